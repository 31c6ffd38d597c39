"""The command line with the extra ``bench``: draw a sweep."""

import subprocess
import sys
from pathlib import Path

ragcache = Path(sys.executable).with_name("ragcache")
trace = ["trace", "make", "--workload", "mmlu", "--requests", "200", "--output", "mmlu.jsonl"]
sweep = ["simulate", "sweep", "mmlu.jsonl", "--policies", "pgdsf,lru", "--plot", "sweep.png"]
for arguments in (trace, sweep):
    subprocess.run([ragcache, *arguments], check=True, stdout=subprocess.DEVNULL)
assert Path("sweep.png").read_bytes().startswith(b"\x89PNG")
