"""Training of the demo model: the loss falls, and a checkpoint continues where it stopped."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from examples.demo_model_training import evaluate
from examples.demo_model_training.batches import Batch
from examples.demo_model_training.export import export, load_exported
from examples.demo_model_training.model import ModelConfig
from examples.demo_model_training.tokenizer import Vocabulary
from examples.demo_model_training.train import Trainer, TrainingOptions, load_model, parse_arguments, train
from tests.conftest import DEMO_MODEL

OPTIONS = TrainingOptions(num_steps=3000, max_batch_tokens=512, is_mixed=False)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def batches_of(trainer: Trainer, stage: int = 0) -> Iterator[Batch]:
    while True:
        yield from trainer.source.batches(stage)


@pytest.mark.slow
def test_loss_falls_within_thirty_steps() -> None:
    trainer = Trainer.start(OPTIONS)
    losses = [trainer.train_step(batch) for batch in itertools.islice(batches_of(trainer), 30)]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_one_seed_gives_the_same_losses() -> None:
    def losses() -> list[float]:
        trainer = Trainer.start(OPTIONS)
        return [trainer.train_step(batch) for batch in itertools.islice(batches_of(trainer), 3)]

    assert losses() == losses()


def test_checkpoint_resumes_with_the_same_next_step(tmp_path: Path) -> None:
    trainer = Trainer.start(OPTIONS)
    for batch in itertools.islice(batches_of(trainer), 4):
        trainer.train_step(batch)
    trainer.save(tmp_path / "demo.pt")
    resumed = Trainer.start(replace(OPTIONS, seed=9))
    resumed.load(tmp_path / "demo.pt")
    assert resumed.progress == trainer.progress
    expected = trainer.train_step(next(trainer.source.batches(0)))
    assert resumed.train_step(next(resumed.source.batches(0))) == expected


def test_a_checkpoint_that_was_taught_something_else_is_refused(tmp_path: Path) -> None:
    Trainer.start(replace(OPTIONS, curriculum="deep")).save(tmp_path / "deep.pt")
    with pytest.raises(SystemExit, match="deep.pt was taught the curriculum 'deep', not 'demo': resume with --curric"):
        Trainer.start(OPTIONS).load(tmp_path / "deep.pt")


def test_training_stops_after_its_last_step(tmp_path: Path) -> None:
    trainer = Trainer.start(replace(OPTIONS, num_steps=3, max_batch_tokens=256))
    train(trainer, tmp_path / "demo.pt")
    assert trainer.progress.step == 3
    assert (tmp_path / "demo.pt").exists()


def test_learned_stage_gives_way_to_the_next() -> None:
    trainer = Trainer.start(OPTIONS)
    assert not trainer.enters_next_stage()
    trainer._recent.extend([True] * 400)
    trainer.progress.stage_step = 50
    assert trainer.enters_next_stage()
    assert (trainer.progress.stage, trainer.progress.stage_step) == (1, 0)


def test_last_stage_is_entered_after_its_share_of_the_steps() -> None:
    trainer = Trainer.start(OPTIONS)
    trainer.progress.step = 2700
    assert trainer.enters_next_stage()
    assert trainer.progress.stage == 4


def deeper(num_layers: int) -> Trainer:
    trained = load_exported(DEMO_MODEL)
    config = replace(trained.config, num_layers=num_layers)
    return Trainer.start(replace(OPTIONS, curriculum="deep"), config, trained)


def test_a_deeper_model_answers_as_the_trained_one_before_it_is_trained() -> None:
    trained = load_exported(DEMO_MODEL)
    same, deep = deeper(num_layers=4), deeper(num_layers=8)
    batch = next(same.source.batches(0))
    assert torch.equal(same.model(batch.ids, batch.positions), trained(batch.ids, batch.positions))
    case = next(case for case in evaluate.CASES if case.name == "two-hop, k = 3")
    prompts = evaluate.held_out_prompts(Vocabulary(), case, evaluate.HELD_OUT_SEED + 900)
    assert evaluate.measure(deep.model, case.name, prompts, num_questions=20).exact_match >= 0.7


def test_every_layer_of_a_deeper_model_adds_something_and_learns() -> None:
    trainer = deeper(num_layers=6)
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    assert all(weight.any() for weight in before.values())
    trainer.train_step(next(trainer.source.batches(3)))
    after = trainer.model.state_dict()
    assert all((after[name] != weight).any() for name, weight in before.items())


def test_a_model_does_not_grow_into_one_with_fewer_layers_or_other_widths() -> None:
    with pytest.raises(ValueError, match="only into more layers"):
        deeper(num_layers=3)
    with pytest.raises(ValueError, match="only into more layers"):
        Trainer.start(OPTIONS, ModelConfig(1152, num_layers=12, width=256), load_exported(DEMO_MODEL))


def test_the_deep_curriculum_asks_over_three_documents_and_over_borders() -> None:
    source = deeper(num_layers=4).source
    labels = {
        answer.label for batch in itertools.islice(source.batches(3), 8) for row in batch.rows for answer in row.answers
    }
    assert {"three-hop", "continued two-hop", "continued"} <= labels


def test_the_demo_curriculum_asks_nothing_of_the_deep_one() -> None:
    source = Trainer.start(OPTIONS).source
    labels = {
        answer.label for batch in itertools.islice(source.batches(3), 8) for row in batch.rows for answer in row.answers
    }
    assert labels
    assert not {"three-hop", "continued two-hop"} & labels


def test_padding_has_no_weight_in_any_batch() -> None:
    trainer = Trainer.start(OPTIONS)
    for batch in itertools.islice(batches_of(trainer, stage=4), 12):
        assert batch.ids.shape == batch.positions.shape == batch.weights.shape
        for index, row in enumerate(batch.rows):
            assert batch.weights[index, len(row.ids) :].sum() == 0
            assert row.positions == sorted(row.positions)
            assert row.positions[-1] < 4096


def test_exported_folder_holds_the_checkpoint_in_bf16(tmp_path: Path) -> None:
    trainer = Trainer.start(OPTIONS)
    trainer.save(tmp_path / "demo.pt")
    export(load_model(tmp_path / "demo.pt"), tmp_path / "model")
    (tmp_path / "model" / "README.md").write_text("card")
    export(load_model(tmp_path / "demo.pt"), tmp_path / "model")
    exported = load_exported(tmp_path / "model").state_dict()
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(exported[name], weight.to(torch.bfloat16).float())
    assert (tmp_path / "model" / "README.md").read_text() == "card"
    assert {path.name for path in tmp_path.iterdir()} == {"demo.pt", "model"}


def test_what_the_deep_curriculum_teaches_is_evaluated_after_all_else() -> None:
    model = load_exported(DEMO_MODEL)
    names = [result.name for result in evaluate.evaluate(model, 1, deep_cases=evaluate.DEEP_CASES)]
    assert names[: -len(evaluate.DEEP_CASES)] == [result.name for result in evaluate.evaluate(model, 1)]
    assert names[-len(evaluate.DEEP_CASES) :] == [case.name for case in evaluate.DEEP_CASES]


def test_the_cards_command_for_a_deeper_model_is_understood() -> None:
    card = (DEMO_MODEL.with_name("deep_demo_model") / "README.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"python -m examples.demo_model_training.train (--out build/deep.pt .*)", card)
    arguments = parse_arguments(command.split())
    assert (arguments.layers, arguments.curriculum) == (12, "deep")
    assert (arguments.grow_from / "config.json").exists()
