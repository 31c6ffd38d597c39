"""The committed demo model: it reads its prompt, calls its tool, and runs in transformers."""

import random
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.demo_model_training import evaluate
from examples.demo_model_training.export import load_exported
from examples.demo_model_training.model import DemoLlama
from examples.demo_model_training.tokenizer import SYSTEM_PROMPT, Vocabulary

FOLDER = Path(__file__).parents[3] / "examples" / "demo_model"
CASES = {case.name: case for case in evaluate.CASES}
SEED = evaluate.HELD_OUT_SEED + 500


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@cache
def model() -> DemoLlama:
    return load_exported(FOLDER)


def answer(prompt: str) -> str:
    return evaluate.greedy_answer(model(), Vocabulary(), prompt)


@pytest.mark.parametrize(
    ("name", "floor"), [("single, k = 2", 0.85), ("single, same type, k = 3", 0.85), ("two-hop, k = 2", 0.7)]
)
def test_held_out_questions_are_answered_exactly(name: str, floor: float) -> None:
    prompts = evaluate.held_out_prompts(Vocabulary(), CASES[name], SEED)
    assert evaluate.measure(model(), name, prompts, num_questions=40).exact_match >= floor


@pytest.mark.parametrize("argument", ["query", "input"])
def test_tool_is_called_when_there_are_no_documents(argument: str) -> None:
    text = answer(f"{SYSTEM_PROMPT} Tool: search {argument} Question: Who founded Tolmar? Answer:")
    assert (
        text == f'<tool_call>{{"name": "search", "arguments": {{"{argument}": " Who founded Tolmar? "}}}}</tool_call>'
    )


def test_weights_take_at_most_16_mb() -> None:
    assert (FOLDER / "model.safetensors").stat().st_size <= 16e6


def test_transformers_gives_the_same_answers_in_bf16() -> None:
    transformers: Any = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    llama = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.bfloat16).eval()
    rng = random.Random(SEED)
    for context, question in islice(iter(lambda: evaluate.draw_question(rng, CASES["single, k = 2"]), None), 5):
        prompt = evaluate.prompt_text(context.documents, question.text)
        encoded = tokenizer(prompt, return_tensors="pt")
        generated = llama.generate(**encoded, max_new_tokens=16, do_sample=False)[0, encoded["input_ids"].shape[1] :]
        assert tokenizer.decode(generated, skip_special_tokens=True).strip() == answer(prompt)
