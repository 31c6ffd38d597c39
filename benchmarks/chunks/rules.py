"""Rules of chunk reuse that the product does not have, for comparison: a vLLM plugin sets one in an engine's processes.

Each replaces one of the product's functions. ``Engine.launch(env=environment(name, folder))`` starts an engine with it.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_RULE_ENV = "RAGCACHE_BENCHMARK_RULE"
_ROOT = Path(__file__).parents[2]


def without_beta() -> None:
    """Recompute ``alpha * CCI`` of every reused chunk, whatever stands before it (Cache-Craft §6)."""
    from ragcache_core.chunk import recompute

    recompute.adjusted_overlap = lambda *_, **__: 0.0  # type: ignore[attr-defined]


def without_impact() -> None:
    """Recompute ``alpha * (1 - beta')`` of a reused chunk, however much it attended to others."""
    from ragcache_core.chunk import recompute

    recompute.context_impact = lambda _: 1.0  # type: ignore[attr-defined, assignment]


def focus_by_entropy() -> None:
    """Choose the focused chunks by Algorithm 1's lines 5 to 9 as they are written."""
    from ragcache_core.chunk import focus

    focus.gap_cut = entropy_cut


def focus_above_entropy() -> None:
    """Choose the focused chunks by the gap that Algorithm 1 finds, with all chunks above it."""
    from ragcache_core.chunk import focus

    focus.gap_cut = lambda descending: entropy_cut(descending, is_above_gap=True)


RULES: Mapping[str, Callable[[], None]] = {
    "without beta": without_beta,
    "without CCI": without_impact,
    "focus by Algorithm 1": focus_by_entropy,
    "focus above Algorithm 1's gap": focus_above_entropy,
}


def entropy_cut(descending: Sequence[float], *, is_above_gap: bool = False) -> int:
    """Return i*, the number of focused chunks by Algorithm 1 (Cache-Craft §3.2.2, lines 5 to 9).

    Line 7 cumulates the entropy ``-p log p`` of the gaps between neighbours, and i* is where it grows most to the next
    gap. So that gap is below chunk ``i* + 1``, which line 9 leaves out; with ``is_above_gap`` it is kept. Of fewer than
    three chunks, or of equal ones, all are focused.
    """
    gaps = [above - below for above, below in itertools.pairwise(descending)]
    total = sum(gaps)
    if len(gaps) < 2 or total <= 0.0:
        return len(descending)
    shares = [gap / total for gap in gaps[1:]]
    growth = [-share * math.log(share) if share > 0.0 else 0.0 for share in shares]
    return growth.index(max(growth)) + 1 + is_above_gap


def environment(rule: str, folder: Path) -> dict[str, str]:
    """Return the variables for an engine with a rule; ``folder`` becomes the plugin's."""
    plugin = folder / "ragcache_benchmark_rules-1.dist-info"
    plugin.mkdir(exist_ok=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: ragcache-benchmark-rules\nVersion: 1\n", "utf-8")
    (plugin / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nragcache_benchmark_rules = benchmarks.chunks.rules:set_rule\n", "utf-8"
    )
    inherited = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, (str(folder), str(_ROOT), inherited)))
    return {_RULE_ENV: rule, "PYTHONPATH": path}


def set_rule() -> None:
    """Set this process's rule; vLLM calls it in each process of an engine."""
    RULES[os.environ[_RULE_ENV]]()
