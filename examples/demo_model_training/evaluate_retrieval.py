"""Held-out exact match over the two documents that retrieval returned: corpora of other seeds, searched for real.

Examples:
  python -m examples.demo_model_training.evaluate_retrieval --model examples/demo_model
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Final

import torch
from tqdm import tqdm

from examples.demo_model_training.corpus import CORPUS_SEED, make_corpus
from examples.demo_model_training.evaluate import greedy_answer, prompt_text
from examples.demo_model_training.export import load_exported
from examples.demo_model_training.tokenizer import Vocabulary
from ragcache_core import Document, DocumentStore

NUM_DOCUMENTS: Final = 2
NUM_CORPORA: Final = 5


def evaluate(model_folder: Path) -> dict[str, float | int]:
    """Return the share of right answers to the single-hop questions of `NUM_CORPORA` unseen corpora."""
    torch.set_num_threads(1)
    model, vocabulary = load_exported(model_folder), Vocabulary()
    num_questions = num_found = num_right = 0
    for seed in tqdm(range(CORPUS_SEED + 1, CORPUS_SEED + 1 + NUM_CORPORA), unit="corpus", disable=None):
        corpus = make_corpus(seed)
        with tempfile.TemporaryDirectory() as folder, DocumentStore.create(Path(folder) / "store") as store:
            store.add([Document(name, text) for name, text in corpus.entries.items()])
            for question in corpus.questions:
                if question.kind == "single":
                    found = store.search(question.question, NUM_DOCUMENTS).documents
                    prompt = prompt_text(tuple(document.text for document in found), question.question)
                    num_questions += 1
                    num_found += question.documents[0] in {document.doc_id for document in found}
                    num_right += greedy_answer(model, vocabulary, prompt) == question.answer
    return {
        "num_questions": num_questions,
        "num_documents": NUM_DOCUMENTS,
        "right_document_found": num_found / num_questions,
        "exact_match": num_right / num_questions,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the exported model")
    print(json.dumps(evaluate(parser.parse_args().model)))


if __name__ == "__main__":
    main()
