"""Training of the demo model: the loss falls, and a checkpoint continues where it stopped."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from examples.demo_model_training.batches import Batch
from examples.demo_model_training.export import export, load_exported
from examples.demo_model_training.train import Trainer, TrainingOptions, load_model, train

OPTIONS = TrainingOptions(num_steps=3000, max_batch_tokens=512)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def batches_of(trainer: Trainer, stage: int = 0) -> Iterator[Batch]:
    while True:
        yield from trainer.source.batches(stage)


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
    resumed = Trainer.start(TrainingOptions(num_steps=3000, seed=9, max_batch_tokens=512))
    resumed.load(tmp_path / "demo.pt")
    assert resumed.progress == trainer.progress
    expected = trainer.train_step(next(trainer.source.batches(0)))
    assert resumed.train_step(next(resumed.source.batches(0))) == expected


def test_training_stops_after_its_last_step(tmp_path: Path) -> None:
    trainer = Trainer.start(TrainingOptions(num_steps=3, max_batch_tokens=256))
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
