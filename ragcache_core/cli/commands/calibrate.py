"""``ragcache calibrate``: how much has to be recomputed for a wanted quality, on one's own model."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ragcache_core.cli.command import Command, print_json
from ragcache_core.cli.commands.quality import measured, model_options, quality_run
from ragcache_core.cli.options import FiniteRange, vllm_args_argument
from ragcache_core.errors import ConfigError
from ragcache_core.runtime.terminal import columns, plain

if TYPE_CHECKING:
    from ragcache_core.chunk import AlphaPoint
    from ragcache_core.quality.summary import QualitySummary

_METRICS = ("exact_match", "token_f1", "rouge_l", "jaccard")


@click.command(
    cls=Command,
    short_help="Find out how much to recompute for a wanted quality.",
    examples=[
        "ragcache calibrate examples/demo_model --questions questions.jsonl",
        "ragcache calibrate org/model --questions questions.jsonl --quality 0.95 --metric rouge_l",
        "ragcache calibrate org/model --questions questions.jsonl --selection cache_craft --alphas 0.5,1,1.5,2",
    ],
)
@click.argument("model")
@click.option(
    "--quality",
    type=FiniteRange(0, min_open=True, max=1),
    default=0.98,
    show_default=True,
    help="Target: share of the score of fully computed answers.",
)
@click.option("--metric", type=click.Choice(_METRICS), default="exact_match", show_default=True, help="What is scored.")
@click.option("--output", type=click.Path(path_type=Path), metavar="FILE", help="Keep the calibration here instead.")
@model_options
@vllm_args_argument
def calibrate(model: str, quality: float, metric: str, output: Path | None, as_json: bool, **options: Any) -> None:
    """Answer questions with several alphas, store the results, and name the best alpha with the least recompute.

    MODEL is a folder in Hugging Face format, or a name of the hub. Afterwards ChunkReuse(quality=...) with the same
    selection uses the stored results. Quality is a share of the score of the same engine with full recompute. Ctrl-C
    leaves the former calibration.
    """
    from ragcache_core.chunk import choose_alpha
    from ragcache_core.profiles.calibration import Calibration, calibration_path, save_calibration
    from ragcache_core.profiles.files import model_identity
    from ragcache_core.profiles.prefill import check_writable
    from ragcache_core.quality import FULL, chunk_methods
    from ragcache_core.quality.summary import overall

    selection, max_recompute = options["selection"], options["max_recompute"]
    run, alphas = quality_run(model, options)
    path = output or calibration_path(model, selection)
    check_writable(path)
    summaries: dict[str, QualitySummary] = {}
    methods = [FULL, *chunk_methods(selection, alphas, max_recompute)]
    for method, of_method in measured(run, methods):
        summaries[method.name] = overall(of_method)
    full = getattr(summaries[FULL.name], metric)
    if not full > 0.0:
        raise ConfigError(
            f"the model's own answers score {metric} {full:g}, computed in full: there is nothing to compare with, so "
            "ask what it can answer, or score by rouge_l"
        )
    points = points_of(
        [(method.chunks.alpha or 0.0, summaries[method.name]) for method in methods if method.chunks], metric, full
    )
    measured_at = datetime.now(UTC).isoformat(timespec="seconds")
    save_calibration(Calibration(model_identity(model), selection, max_recompute, measured_at, tuple(points)), path)
    if not as_json:
        click.echo(_table(points, [summaries[method.name] for method in methods[1:]], metric))
    chosen = choose_alpha(points, quality)
    if as_json:
        rows = [{"alpha": p.alpha, "quality": p.quality, "recomputed": p.recomputed} for p in points]
        found = {"model": model, "selection": selection, "metric": metric, "full": full, "quality": quality}
        print_json({**found, "alpha": chosen.alpha, "points": rows, "path": str(path)})
        return
    click.echo(f"alpha {chosen.alpha:g} keeps {chosen.quality:.1%} of {metric} {full:.3f}")
    click.echo(f"ragcache: kept in {path}", err=True)


def points_of(measured_alphas: Sequence[tuple[float, QualitySummary]], metric: str, full: float) -> list[AlphaPoint]:
    """Return what each alpha came to: its quality as a share of ``full``, the score with everything computed."""
    from ragcache_core.chunk import AlphaPoint

    return [
        AlphaPoint(alpha, getattr(summary, metric) / full, summary.recomputed, summary.num_questions)
        for alpha, summary in measured_alphas
    ]


def _table(points: Sequence[AlphaPoint], summaries: Sequence[QualitySummary], metric: str) -> str:
    rows = (
        (
            f"{point.alpha:g}",
            f"{getattr(summary, metric):.3f}",
            f"{point.quality:.1%}",
            f"{point.recomputed:.1%}",
            f"{summary.num_computed_tokens:,}",
        )
        for point, summary in zip(points, summaries, strict=True)
    )
    return plain(columns(rows, ">>>>>", ("alpha", metric, "quality", "recomputed", "computed tokens")))
