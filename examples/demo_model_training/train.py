"""Train the demo model on one CPU core, or a deeper one.

Examples:
  python -m examples.demo_model_training.train --out build/demo.pt
  python -m examples.demo_model_training.train --out build/demo.pt --resume build/demo.pt
  python -m examples.demo_model_training.train --out build/deep.pt --layers 12 --grow-from examples/demo_model \
    --curriculum deep --steps 7000 --device cuda
"""

import argparse
import random
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from examples.demo_model_training.batches import ANSWER_WEIGHT, Batch, BatchSource
from examples.demo_model_training.curriculum import CURRICULA
from examples.demo_model_training.initialisation import grow, initialise
from examples.demo_model_training.model import DemoLlama, ModelConfig
from examples.demo_model_training.tokenizer import Vocabulary

TRAINING_SEED_OFFSET: Final = 1000
"""Language seeds of training are `TRAINING_SEED_OFFSET + seed`; evaluation uses seeds from 777000."""

_PROMPT_TOKENS_TRAINED: Final = 0.15
_PROMPT_LOSS_WEIGHT: Final = 0.2
_STAGE_ACCURACY: Final = 0.85
_STAGE_WINDOW: Final = 400
_REPORT_STEPS: Final = 100


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """What one run is told. Learning rates are peak values of AdamW."""

    num_steps: int
    seed: int = 0
    matrix_learning_rate: float = 1.2e-3
    embedding_learning_rate: float = 3e-3
    warm_up_steps: int = 30
    decay_share: float = 0.3
    """The learning rate falls to zero over this last share of the steps."""
    crowd_start_share: float = 0.6
    """Share of the steps after which prompts with many documents come in."""
    max_batch_tokens: int = 1536
    checkpoint_s: float = 120.0
    curriculum: str = "demo"
    """A name in `CURRICULA`."""
    device: str = "cpu"
    is_mixed: bool = True
    """Matrices are multiplied in bf16; a CPU without instructions for it is several times slower so."""


@dataclass(slots=True)
class Progress:
    """Where a run stands; saved in its checkpoints."""

    step: int = 0
    num_tokens: int = 0
    elapsed_s: float = 0.0
    stage: int = 0
    stage_step: int = 0


@dataclass(slots=True)
class Trainer:
    """A model, its optimiser and its source of batches."""

    options: TrainingOptions
    model: DemoLlama
    optimizer: torch.optim.Optimizer
    source: BatchSource
    progress: Progress = field(default_factory=Progress)
    _recent: deque[bool] = field(default_factory=lambda: deque(maxlen=_STAGE_WINDOW))
    _tally: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))

    @classmethod
    def start(
        cls, options: TrainingOptions, config: ModelConfig | None = None, grown_from: DemoLlama | None = None
    ) -> "Trainer":
        """Return a trainer with a freshly initialised model, or one that starts as a trained one with fewer layers."""
        torch.manual_seed(options.seed)
        vocabulary = Vocabulary()
        model = DemoLlama(config or ModelConfig(vocabulary.padded_size))
        initialise(model, vocabulary)
        if grown_from is not None:
            grow(model, grown_from)
        model.to(options.device)
        embeddings = [model.embedding.weight, model.head.weight]
        vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
        matrices = [parameter for parameter in model.blocks.parameters() if parameter.dim() == 2]
        optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "lr": options.matrix_learning_rate},
                {"params": embeddings + vectors, "lr": options.embedding_learning_rate},
            ],
            betas=(0.9, 0.98),
            weight_decay=0.01,
        )
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
        rng = random.Random(TRAINING_SEED_OFFSET + options.seed)
        source = BatchSource(vocabulary, rng, options.max_batch_tokens, CURRICULA[options.curriculum])
        return cls(options, model, optimizer, source)

    @property
    def share_done(self) -> float:
        """How much of the run is over, 0 to 1."""
        return self.progress.step / self.options.num_steps

    def train_step(self, batch: Batch) -> float:
        """Update the model on one batch; return the mean loss of the answer tokens in nats."""
        self._set_learning_rate()
        weights = batch.weights[:, 1:]
        chosen = (weights >= ANSWER_WEIGHT) | ((weights > 0) & (torch.rand_like(weights) < _PROMPT_TOKENS_TRAINED))
        device = self.options.device
        targets = batch.ids[:, 1:][chosen].to(device)
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=self.options.is_mixed):
            hidden = self.model.hidden(batch.ids[:, :-1].to(device), batch.positions[:, :-1].to(device))
            logits = self.model.head(hidden[chosen.to(device)])
        losses = F.cross_entropy(logits.float(), targets, reduction="none")
        is_answer = (weights[chosen] >= ANSWER_WEIGHT).to(device)
        loss_weights = torch.where(is_answer, 1.0, _PROMPT_LOSS_WEIGHT)
        self.optimizer.zero_grad(set_to_none=True)
        ((losses * loss_weights).sum() / loss_weights.sum()).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.progress.step += 1
        self.progress.stage_step += 1
        self.progress.num_tokens += int((batch.weights > 0).sum())
        correct = torch.zeros_like(chosen)
        correct[chosen] = (logits.argmax(-1) == targets).cpu()
        self._count_answers(batch, correct)
        return float(losses.detach()[is_answer].mean())

    def _set_learning_rate(self) -> None:
        remaining = max(0.02, (1 - self.share_done) / self.options.decay_share)
        factor = min(1.0, (self.progress.step + 1) / self.options.warm_up_steps, remaining)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor

    def _count_answers(self, batch: Batch, correct: Tensor) -> None:
        for row_index, row in enumerate(batch.rows):
            for answer in row.answers:
                is_right = bool(correct[row_index, answer.start - 1 : answer.end - 1].all())
                crowd = str(answer.num_entities) if answer.num_entities <= 5 else "6+"
                for label in {answer.label, f"{answer.label} k={crowd}"} if answer.num_entities else {answer.label}:
                    self._tally[label][0] += is_right
                    self._tally[label][1] += 1
                if answer.label == "single":
                    self._recent.append(is_right)

    def enters_next_stage(self) -> bool:
        """Move to the next stage of the curriculum if this one is learned (the last: after its share of the steps)."""
        progress, last = self.progress, len(self.source.curriculum) - 1
        is_learned = len(self._recent) == _STAGE_WINDOW and sum(self._recent) > _STAGE_ACCURACY * _STAGE_WINDOW
        is_due = progress.stage < last - 1 and is_learned and progress.stage_step > 40
        if is_due or (progress.stage < last and self.share_done >= self.options.crowd_start_share):
            progress.stage = progress.stage + 1 if is_due else last
            progress.stage_step = 0
            self._recent.clear()
            return True
        return False

    def take_report(self) -> str:
        """Return the training accuracy by kind of question since the last report, and forget it."""
        shares = {label: right / total for label, (right, total) in sorted(self._tally.items())}
        self._tally.clear()
        return " ".join(f"{label} {share:.2f}" for label, share in shares.items())

    def save(self, path: Path) -> None:
        """Write a checkpoint that `load` continues from. Atomic: a crash leaves the last one whole."""
        state = {
            "config": self.model.config.to_dict(),
            "curriculum": self.options.curriculum,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": {name: getattr(self.progress, name) for name in Progress.__slots__},
            "language_state": self.source.rng.getstate(),
            "torch_state": torch.get_rng_state(),
        }
        temporary = path.with_suffix(path.suffix + ".tmp")
        torch.save(state, temporary)
        temporary.replace(path)

    def load(self, path: Path) -> None:
        """Continue from a checkpoint of the same model configuration.

        Raises:
            SystemExit: it was taught another curriculum.
        """
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
        taught = state.get("curriculum", "demo")  # what older checkpoints do not say
        if taught != self.options.curriculum:
            raise SystemExit(
                f"{path} was taught the curriculum {taught!r}, not {self.options.curriculum!r}: resume with "
                f"--curriculum {taught}, or leave --resume out"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])
        self.source.rng.setstate(state["language_state"])
        torch.set_rng_state(state["torch_state"])


def load_model(path: Path) -> DemoLlama:
    """Return the model of a checkpoint, in float32 and evaluation mode."""
    state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    model = DemoLlama(ModelConfig(**state["config"]))
    model.load_state_dict(state["model"])
    model.eval()
    return model


def _exported(folder: Path) -> DemoLlama:
    from examples.demo_model_training.export import load_exported  # it imports this module

    return load_exported(folder)


def train(trainer: Trainer, out: Path) -> None:
    """Train to the last step; write checkpoints to `out`."""
    options, progress = trainer.options, trainer.progress
    last_tick_s = last_save_s = time.monotonic()
    losses: list[float] = []
    with tqdm(total=options.num_steps, initial=progress.step, unit="step") as bar:
        while trainer.share_done < 1:
            for batch in trainer.source.batches(progress.stage):
                losses.append(trainer.train_step(batch))
                now_s = time.monotonic()
                progress.elapsed_s += now_s - last_tick_s
                last_tick_s = now_s
                bar.update()
                if progress.step % _REPORT_STEPS == 0:
                    mean_loss = sum(losses) / len(losses)
                    losses.clear()
                    tqdm.write(
                        f"step {progress.step} stage {progress.stage} {progress.num_tokens / 1e6:.2f}M tokens "
                        f"{progress.elapsed_s:.0f} s loss {mean_loss:.3f} | {trainer.take_report()}"
                    )
                if now_s - last_save_s > options.checkpoint_s:
                    trainer.save(out)
                    last_save_s = now_s
                if trainer.enters_next_stage() or trainer.share_done >= 1:
                    break
    trainer.save(out)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="checkpoint file to write")
    parser.add_argument("--steps", type=int, default=11_000, help="steps in all, those of --resume included (11000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the training language")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model (4)")
    parser.add_argument("--grow-from", type=Path, help="folder of an exported model with fewer layers to start from")
    parser.add_argument("--curriculum", choices=list(CURRICULA), default="demo", help="what is taught (demo)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the model is trained (cpu)")
    parser.add_argument("--float32", action="store_true", help="compute in float32: for CPUs without bf16")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; one is best for so small a model")
    parser.add_argument("--resume", type=Path, help="checkpoint to continue from")
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    options = TrainingOptions(
        num_steps=arguments.steps,
        seed=arguments.seed,
        curriculum=arguments.curriculum,
        device=arguments.device,
        is_mixed=not arguments.float32,
    )
    config = ModelConfig(Vocabulary().padded_size, num_layers=arguments.layers)
    trainer = Trainer.start(options, config, _exported(arguments.grow_from) if arguments.grow_from else None)
    if arguments.resume:
        trainer.load(arguments.resume)
    train(trainer, arguments.out)


if __name__ == "__main__":
    main()
