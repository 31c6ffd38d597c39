"""A server that serves nothing: it has a process below it, as vLLM's has, and ends with its owner."""

from __future__ import annotations

import subprocess
import sys
import time

from ragcache_core.vllm_plugin.server.__main__ import end_with_owner

if __name__ == "__main__":
    end_with_owner()
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("serving", flush=True)
    time.sleep(600)
