"""The command line with the extra ``retrieval`` alone: index a folder, ask an engine that runs elsewhere."""

import json
import os
import subprocess
import sys
from pathlib import Path

notes = Path("notes")
notes.mkdir()
(notes / "zorval.md").write_text("Zorval is a company. Zorval was founded by Anna. Zorval makes clocks. " * 3)
(notes / "tenrik.md").write_text("Tenrik builds ships in the north. Boris began with it, and sold it again. " * 3)
ragcache = [Path(sys.executable).with_name("ragcache")]
subprocess.run([*ragcache, "index", notes, "--store", "notes.store"], check=True)
question = ["ask", "Who founded Zorval?", "--store", "notes.store", "--k", "1", "--max-tokens", "4", "--json"]
asked = [*ragcache, *question, "--url", os.environ["RAGCACHE_BASE_URL"]]
answer = json.loads(subprocess.run(asked, check=True, stdout=subprocess.PIPE).stdout)
found = answer["stats"]["documents"]
print(json.dumps({"documents": [d["doc_id"] for d in found], "num_tokens": [d["num_tokens"] for d in found]}))
