import subprocess
import sys

import pytest

import ragcache_integrations.langchain as package


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("missing", ["langchain_core", "langchain_openai"])
def test_without_langchain_the_error_says_what_to_install(missing: str) -> None:
    result = run(f"import sys; sys.modules[{missing!r}] = None; import ragcache_integrations.langchain")
    assert result.returncode != 0
    assert "ConfigError" in result.stderr
    assert missing in result.stderr
    assert 'pip install "ragcache[langchain]"' in result.stderr


@pytest.mark.slow
def test_the_engine_stays_out_of_the_application() -> None:
    names = "import sys; from ragcache_integrations.langchain import *"
    result = run(f"{names}; print(sorted({{'vllm', 'llama_index'}} & set(sys.modules)))")
    assert result.stdout.strip() == "[]", result.stderr


def test_what_is_exported_is_there() -> None:
    assert package.__all__ == sorted(package.__all__)
    for name in package.__all__:
        assert getattr(package, name).__module__.startswith(("ragcache_integrations.langchain", "ragcache_core.client"))
