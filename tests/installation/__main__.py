"""Install the wheel with each extra into a clean environment, and ask an engine from there: ``make test-install``.

The engine runs here, on a relative path and with a chat template of its own. A client elsewhere can know neither: the
server finds the documents.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ragcache_core.client import Engine
from ragcache_core.config import CacheConfig

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MODEL = "examples/demo_model"
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }} says: {{ m.content }}\n{% endfor %}"
MOST_MB = {"langchain": 350, "llamaindex": 350}
"""The extra ``retrieval`` is Faiss and scipy: as large as they are."""
EXPECTED = {"langchain": ["zorval", "tenrik"], "llamaindex": ["zorval", "tenrik"], "retrieval": ["zorval.md"]}
"""The documents that the program of an extra, beside this file, finds in its prompt."""
ADDED = ("loaders", "bench")
"""Extras that are installed above ``retrieval``, which they ask for. Their programs need no engine. Not ``minilm``: it
brings PyTorch, which takes minutes."""
OWN_IMPORT = "from ragcache_integrations.langchain import ChatRAGCache"
OPENAI_IMPORT = "from langchain_openai import ChatOpenAI"
"""Both packages import a name when it is asked for: without names nothing would be measured."""
MOST_RATIO = 1.7
"""It is 1.4; a package that is imported by mistake makes it more, a slow machine does not."""
NUM_IMPORTS = 5


def main(wheel: Path) -> None:
    """Check ``wheel``; exit with what is wrong."""
    wrong = []
    with tempfile.TemporaryDirectory(prefix="ragcache-install-") as name, ThreadPoolExecutor(1) as pool:
        folder = Path(name)
        environments = pool.submit(lambda: {extra: install(wheel, extra, folder) for extra in EXPECTED})
        os.chdir(ROOT)
        settings = {"dtype": "float32", "enforce_eager": True, "max_model_len": 2048, "chat_template": TEMPLATE}
        cache = CacheConfig(kv_cache_bytes="256MiB", block_size=32, host_bytes=0)
        with Engine.launch(MODEL, cache=cache, log_path=folder / "server.log", **settings) as engine:
            for extra, python in environments.result().items():
                size_mb = size_of(python) / 1e6
                print(f"{extra:11} {size_mb:5.0f} MB", flush=True)
                if size_mb > MOST_MB.get(extra, size_mb):
                    wrong.append(f"[{extra}] takes {size_mb:.0f} MB, at most {MOST_MB[extra]} are allowed")
                wrong += ask(python, extra, engine, folder)
        for extra in ADDED:
            python = environments.result()["retrieval"]
            add(wheel, extra, python)
            wrong += try_out(python, extra, folder)
        python = environments.result()["langchain"]
        own_s, openai_s = import_s(python, OWN_IMPORT), import_s(python, OPENAI_IMPORT)
        print(f"import      {own_s:.2f} s of the processor, langchain_openai {openai_s:.2f} s")
        if own_s > MOST_RATIO * openai_s:
            wrong.append(
                f"{OWN_IMPORT!r} takes {own_s:.2f} s, langchain_openai {openai_s:.2f}: at most {MOST_RATIO} times as "
                "long is allowed"
            )
    sys.exit("\n".join(f"ragcache: error: {line}" for line in wrong) or 0)


def install(wheel: Path, extra: str, folder: Path) -> Path:
    """Return the Python of a new environment that has ``wheel`` with one extra, as pip finds its dependencies."""
    environment = folder / extra
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = environment / "bin" / "python"
    add(wheel, extra, python)
    return python


def add(wheel: Path, extra: str, python: Path) -> None:
    """Install ``wheel`` with one extra into the environment of ``python``."""
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, f"{wheel.resolve()}[{extra}]"], env=without("PYTHON"), check=True)


def try_out(python: Path, extra: str, folder: Path) -> list[str]:
    """Run the program of an extra that needs no engine; return what is wrong."""
    program = [python, HERE / f"{extra}_program.py"]
    done = subprocess.run(program, cwd=folder, env=clean(folder), capture_output=True, text=True, check=False)
    print(f"{extra:11} " + ("works" if done.returncode == 0 else "fails"), flush=True)
    return [f"[{extra}] fails: {done.stderr.strip()}"] if done.returncode else []


def ask(python: Path, extra: str, engine: Engine, folder: Path) -> list[str]:
    """Run the program of an extra; return what is wrong with what it prints and takes."""
    address = {"RAGCACHE_BASE_URL": engine.base_url, "RAGCACHE_API_KEY": engine.api_key}
    started_s = time.monotonic()
    done = subprocess.run(
        [python, HERE / f"{extra}_program.py"],
        cwd=folder,
        env=clean(folder) | address,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    duration_s = time.monotonic() - started_s
    if done.returncode:
        return [f"[{extra}] cannot ask: {done.stderr.strip()}"]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{'':11} documents {found['documents']}, {found['num_tokens']} tokens of them, after {duration_s:.1f} s")
    wrong = []
    if found["documents"] != EXPECTED[extra] or not all(found["num_tokens"]):
        wrong.append(f"[{extra}] finds {found}, not the documents {EXPECTED[extra]}")
    wrong += [f"[{extra}] says: {line}" for line in done.stderr.splitlines() if "PyTorch" in line or "known" in line]
    return wrong


def size_of(python: Path) -> int:
    """Return the bytes of an environment's site-packages."""
    (packages,) = python.parents[1].glob("lib/python3*/site-packages")
    return sum(path.lstat().st_size for path in packages.rglob("*") if path.is_file())


def import_s(python: Path, statement: str) -> float:
    """Return the least processor time that a new process needs for an import."""
    run = [python, "-c", f"import time; {statement}; print(time.process_time())"]
    settings: dict[str, Any] = {"env": without("PYTHON"), "capture_output": True, "text": True, "check": True}
    return min(float(subprocess.run(run, **settings).stdout) for _ in range(NUM_IMPORTS))


def clean(folder: Path) -> dict[str, str]:
    """Return the variables of a user who has set none, and whose cache is empty."""
    return without("PYTHON", "HF_", "RAGCACHE_", "VLLM_") | {"XDG_CACHE_HOME": str(folder / "cache")}


def without(*beginnings: str) -> dict[str, str]:
    """Return this process's variables but those whose names begin so."""
    return {name: value for name, value in os.environ.items() if not name.startswith(beginnings)}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
