"""A compiled corpus: an engine that has just started loads the documents of its first questions.

``ragcache compile`` prefills the documents of earlier questions into a folder, with an engine of its own, and ends. The
engine that starts then has empty memory, and only reads the folder. Run it with ``python -m examples.compiled_corpus``.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from examples._shared import DEMO_STORE, Row, demo_questions, open_demo_store, open_engine, read_options, show
from ragcache_core import CacheConfig, PromptLayout

NUM_DOCUMENTS = 2
SIZES = {"kv_cache_bytes": "256MiB", "host_bytes": "256MiB", "block_size": 32}
VLLM_ARGS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "2048")
"""Those of ``open_engine``: KV of other ones is never found."""


def compile_corpus(model: str, questions: Sequence[str], folder: Path) -> str:
    """Prefill what ``questions`` retrieve into ``folder``, and return its URL."""
    log, kv = folder / "questions.txt", folder / "kv"
    log.write_text("\n".join(questions), encoding="utf-8")
    sizes = [text for name, value in SIZES.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    where = ["--store", str(DEMO_STORE), "--shared", kv.as_uri(), "--from-log", str(log), "-k", str(NUM_DOCUMENTS)]
    command = ["compile", model, *where, "--budget", "4MiB", *sizes, "--", *VLLM_ARGS]
    subprocess.run([sys.executable, "-m", "ragcache_core", *command], check=True, stdout=2)  # --json has stdout alone
    return kv.as_uri()


def main(arguments: Sequence[str] | None = None) -> None:
    options = read_options(__doc__, arguments)
    asked = demo_questions("single")[:4]
    layout = PromptLayout()
    rows = []
    with tempfile.TemporaryDirectory() as folder, open_demo_store() as store:
        shared = compile_corpus(options.model, [each["question"] for each in asked], Path(folder))
        with open_engine(options, CacheConfig(shared=shared, shared_read_only=True, **SIZES)) as engine:
            for each in asked:
                documents = store.search(each["question"], NUM_DOCUMENTS).documents
                answer = engine.generate(layout.messages(documents, each["question"]), max_tokens=24)
                note = "right" if answer.text.strip() == each["answer"] else "wrong"
                rows.append(Row.of(each["question"], note, answer.text, answer.stats))
    show(rows, options)


if __name__ == "__main__":
    main()
