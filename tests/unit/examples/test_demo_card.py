"""The model card's commands are the programs' own."""

import re

from examples.demo_model_training import evaluate, export, train
from tests.conftest import DEMO_MODEL


def test_the_cards_commands_are_understood_by_the_programs() -> None:
    card = (DEMO_MODEL / "README.md").read_text(encoding="utf-8")
    block = re.search(r"```\n(python -m examples.*?)```", card, re.DOTALL)
    assert block is not None
    commands = {}
    for line in block.group(1).splitlines():
        program, *arguments = line.split(" > ")[0].removeprefix("python -m examples.demo_model_training.").split()
        commands[program] = arguments
    assert set(commands) == {"train", "export", "evaluate"}
    assert train.parse_arguments(commands["train"]).steps == 11_000
    export.parse_arguments(commands["export"])
    evaluate.parse_arguments(commands["evaluate"])
