"""A scripted server in a process of its own, which is started as vLLM's and ends with its owner."""

from __future__ import annotations

import os
import sys
import time

from ragcache_core.vllm_plugin.server.__main__ import end_with_owner
from tests.support.scripted_server import IDLE, THREE_TIERS, ScriptedServer

FAILING_PORT = "SCRIPTED_FAILING_PORT"
"""A process that is to listen at the port in this variable fails."""

if __name__ == "__main__":
    end_with_owner()
    port, model = (sys.argv[sys.argv.index(flag) + 1] for flag in ("--port", "--model"))
    if os.environ.get(FAILING_PORT) == port:
        raise SystemExit("RuntimeError: no room for the model")
    key = os.environ["VLLM_API_KEY"]
    with ScriptedServer(port=int(port), api_key=key, root=model, cache=dict(THREE_TIERS), load=IDLE):
        time.sleep(600)  # until its owner ends it
