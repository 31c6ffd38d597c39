"""What the first request needs is imported before it: a process of its own sees what is imported when."""

import subprocess
import sys

SCRIPT = """
import sys
import threading
from ragcache_core import PromptLayout
from ragcache_core.client import Engine
from tests.support.asking_ahead import speculate
from tests.support.scripted_server import IDLE, ScriptedServer

def openai_modules():
    return {name for name in sys.modules if name.startswith(("openai", "anyio"))}

with ScriptedServer() as server:
    server.load = IDLE
    before = openai_modules()
    with Engine.connect(server.url, tokenizer="examples/demo_model") as engine:
        assert not [t for t in threading.enumerate() if t.name == "ragcache-imports"]
        at_hand = openai_modules()
        prompt = PromptLayout().render(engine.tokenizer, [], "Who?")
        speculate(engine, lambda: engine.generate(prompt, max_tokens=4))
        engine.generate(prompt, max_tokens=4)
        engine.generate([{"role": "user", "content": "Who?"}], max_tokens=4)
        print(len(at_hand - before), sorted(openai_modules() - at_hand))
"""


def test_a_first_search_imports_nothing_any_more() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    num_imported, late = done.stdout.split(maxsplit=1)
    assert int(num_imported) > 100
    assert late.strip() == "[]"


LAUNCHES = """
import sys
from concurrent.futures import ThreadPoolExecutor
from ragcache_core.client.prompts.tokenizer import ModelTokenizer

sys.setswitchinterval(1e-6)
question = [{"role": "user", "content": "Who?"}]
with ThreadPoolExecutor(4) as threads:
    tokenizers = [threads.submit(ModelTokenizer, "examples/demo_model") for _ in range(4)]
    print(len({t.result().render(question) for t in tokenizers}), len(tokenizers))
"""


def test_engines_that_are_launched_at_the_same_time_all_have_their_tokenizer() -> None:
    done = subprocess.run([sys.executable, "-c", LAUNCHES], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "4"]
