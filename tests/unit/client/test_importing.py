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

with ScriptedServer(root="examples/demo_model") as server:
    server.load = IDLE
    before = openai_modules()
    with Engine.connect(server.url) as engine:
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
