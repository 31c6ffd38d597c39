"""Cost models of prefill and transfers: the paper's four models on their testbeds, an H100, or a profile."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ragcache_core.errors import ConfigError
from ragcache_core.policy.prefill_cost import PrefillCost, PrefillCostModel, StepTimes, read_number

_PCIE4_GIB_PER_S, _PCIE5_GIB_PER_S, _NVME_GIB_PER_S = 11.5, 23.0, 2.0
_KV_7B_TOKENS_PER_GIB = 8_192
_OF_KV: Mapping[str, float] = {
    "tokens_per_gib": _KV_7B_TOKENS_PER_GIB,
    "host_gib_per_s": _PCIE4_GIB_PER_S,
    "disk_gib_per_s": _NVME_GIB_PER_S,
}
"""Optional fields of a file, with their defaults."""


@dataclass(frozen=True, slots=True)
class PrefillFormula:
    """T(a, b) = base + per_cached a + per_new b + per_pair b (a + b / 2) seconds.

    The base is reading the weights, b the products with them, b (a + b / 2) the pairs that attention compares, and a
    what a kernel spends on a cached prefix.
    """

    base_s: float
    per_cached_s: float
    per_new_s: float
    per_pair_s: float

    def estimate_s(self, num_cached_tokens: int, num_new_tokens: int, /) -> float:
        """Return the seconds of a prefill; 0 without new tokens."""
        if num_new_tokens <= 0:
            return 0.0
        a, b = num_cached_tokens, num_new_tokens
        return self.base_s + self.per_cached_s * a + self.per_new_s * b + self.per_pair_s * b * (a + b / 2)


@dataclass(frozen=True, slots=True)
class Testbed:
    """A model on a machine.

    Attributes:
        cost: cost model of a prefill.
        base_s: seconds of an iteration that its requests share.
        tokens_per_gib: tokens of KV per GiB.
        host_gib_per_s, disk_gib_per_s: bandwidth of loads to the GPU.
        decode_per_token_s: seconds per context token of a decoding iteration; ``None``: by ``cost`` of one new token.
        assumed: names and values that its file lacks.
        steps: measured step times.
    """

    __test__ = False  # it is no test, whatever pytest makes of its name

    name: str
    cost: PrefillCost
    base_s: float
    tokens_per_gib: int
    host_gib_per_s: float = _PCIE4_GIB_PER_S
    disk_gib_per_s: float = _NVME_GIB_PER_S
    decode_per_token_s: float | None = None
    assumed: tuple[str, ...] = ()
    steps: StepTimes | None = None

    def decode_s(self, num_context_tokens: int) -> float:
        """Return the seconds of an iteration that computes one token after ``num_context_tokens``."""
        if self.decode_per_token_s is None:
            return self.cost.estimate_s(num_context_tokens, 1)
        return self.base_s + self.decode_per_token_s * num_context_tokens

    def transfer_s(self, num_host_tokens: int, num_disk_tokens: int) -> float:
        """Return the seconds to transfer KV to the GPU; from disk it passes through the host."""
        num_host_gib = (num_host_tokens + num_disk_tokens) / self.tokens_per_gib
        return num_host_gib / self.host_gib_per_s + num_disk_tokens / self.tokens_per_gib / self.disk_gib_per_s

    def lengths_beyond(self, num_cached_tokens: int, num_new_tokens: int) -> str | None:
        """Return a note if prompts are longer than the measured ones; ``None`` for a formula."""
        if not isinstance(self.cost, PrefillCostModel):
            return None
        cached, new = self.cost.cached_tokens[-1], self.cost.new_tokens[-1]
        if num_cached_tokens <= cached and num_new_tokens <= new:
            return None
        return (
            f"the profile {self.name} ends at {cached:,} cached and {new:,} new tokens, the trace needs up to "
            f"{num_cached_tokens:,} and {num_new_tokens:,}"
        )


_A10G_7B = PrefillFormula(0.028, 1.25e-5, 2.1e-4, 1.2e-8)

TESTBEDS: Mapping[str, Testbed] = {
    testbed.name: testbed
    for testbed in (
        Testbed("a10g-mistral-7b", _A10G_7B, 0.028, _KV_7B_TOKENS_PER_GIB, decode_per_token_s=2.2e-7),
        Testbed("a10g-llama2-7b", _A10G_7B, 0.028, 2_048, decode_per_token_s=8.7e-7),
        Testbed(
            "h800-mixtral-8x7b",
            PrefillFormula(0.0155, 1.1e-6, 1.19e-4, 5.9e-10),
            0.0155,
            8_192,
            _PCIE5_GIB_PER_S,
            decode_per_token_s=2.0e-8,
        ),
        Testbed(
            "h800-llama2-70b",
            PrefillFormula(0.022, 2.8e-6, 1.55e-4, 2.9e-9),
            0.022,
            3_276,
            _PCIE5_GIB_PER_S,
            decode_per_token_s=4.9e-8,
        ),
    )
}
"""The paper's models and machines (RAGCache §7, Table 1). None of this was measured by us.

``a10g-*``: 1.0 s for 4,128 new tokens (Figure 2) and 11.4 times less after 4,096 cached ones (Figure 4, LLaMA2-7B); a
product costs 14.5 GFLOP a token, at 69 TFLOP/s, and 14 GiB of weights are read at 600 GB/s. Both models have the same
size; what differs is their KV, 0.125 and 0.5 MiB a token. PCIe 4.0 brings 11.5 GiB/s, which makes the 3.9 times of
Figure 4.

``h800-*``, two GPUs: weights (96.8 and 140 GiB) are read at 2 x 3.35 TB/s. A new token costs 138 GFLOP in LLaMA2-70B,
at 45 % of 2 x 989 TFLOP/s, and 25.8 GFLOP in Mixtral (two of eight experts), at 11 %: the shares at which prompts of
two documents of 1,900 tokens saturate the engine just above 1.5 and 2 requests a second, where vLLM fails its SLO in
Figure 16. Pairs cost 4 x layers x width FLOP at 45 %. A cached token costs what it does on the A10G, scaled by the
bytes of its KV and by the bandwidth. PCIe 5.0 brings twice what 4.0 does.

A decoding iteration reads the weights once and the KV of the context. A disk is an NVMe drive of 2 GiB/s.
"""

MEASURED: Mapping[str, Path] = {"h100-llama3-8b": Path(__file__).with_name("h100_llama3_8b.json")}
"""What was measured by ``make gpu-check`` on one NVIDIA H100 80GB HBM3: Llama-3-8B's shape, random weights, PyTorch."""


def load_testbed(name_or_file: str) -> Testbed:
    """Return the testbed of a name in :data:`TESTBEDS` or :data:`MEASURED`, or of a JSON file.

    A file holds a profile as ``ragcache profile`` writes it, or the prefill times alone. It may also have
    ``tokens_per_gib`` (8,192 without it), ``host_gib_per_s``, ``disk_gib_per_s`` and ``steps``; instead of times
    ``formula`` with ``base_s``, ``per_cached_s``, ``per_new_s`` and ``per_pair_s``.

    Raises:
        ConfigError: there is neither such a name nor such a file, or it holds something else.
    """
    if name_or_file in TESTBEDS:
        return TESTBEDS[name_or_file]
    path = MEASURED.get(name_or_file, Path(name_or_file))
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        names = ", ".join((*TESTBEDS, *MEASURED))
        raise ConfigError(
            f"cost_model is {name_or_file!r}, which is neither a file nor one of {names}: name one, or measure with "
            "ragcache profile --output FILE"
        ) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): name another profile") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON ({error}): name a profile that ragcache profile wrote") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds {data!r:.40}, no profile: measure one with ragcache profile --output FILE")
    try:
        return _read(name_or_file if name_or_file in MEASURED else str(path), data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def read_searches(path: Path) -> tuple[float, ...]:
    """Return the search times of a file in seconds: its list ``search_s``, or those of its ``runs``.

    Raises:
        ConfigError: it cannot be read, or has no searches, or other things than seconds.
    """
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"search {path} cannot be read ({error.strerror}): name measured searches") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"search {path} is not JSON ({error}): name a file of measured searches") from error
    found = data.get("search_s") if isinstance(data, dict) else None
    if isinstance(data, dict) and isinstance(runs := data.get("runs"), list):
        searched = [run["search"] for run in runs if isinstance(run, dict) and run.get("search")]
        found = [seconds for search in searched for seconds in search.get("search_s", ())]
    if not isinstance(found, list) or not found:
        raise ConfigError(f"search {path} has no searches: name a file with a list of seconds, search_s")
    for seconds in found:
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
            raise ConfigError(f"search {path} has {seconds!r:.40} among its seconds; each must be 0 or more")
    return tuple(map(float, found))


def _read(name: str, data: Mapping[str, object]) -> Testbed:
    cost: PrefillCost
    if isinstance(formula := data.get("formula"), dict):
        names = ("base_s", "per_cached_s", "per_new_s", "per_pair_s")
        unknown = sorted(set(formula) - set(names))
        if unknown:
            raise ConfigError(f"formula has {unknown[0]!r}; it has {', '.join(names)}")
        numbers = [read_number(formula, key, None if key == "base_s" else 0.0) for key in names]
        cost = PrefillFormula(*numbers)
        base_s = numbers[0]
    else:
        times = PrefillCostModel.from_dict(data.get("cost_model", data))
        cost, base_s = times, min(map(min, times.seconds))
    tokens_per_gib, host_gib_per_s, disk_gib_per_s = (read_number(data, key, value) for key, value in _OF_KV.items())
    for key, value in (("host_gib_per_s", host_gib_per_s), ("disk_gib_per_s", disk_gib_per_s)):
        if not value:
            raise ConfigError(f"{key} is 0; give the GiB that a link brings in a second")
    if tokens_per_gib < 1:
        raise ConfigError("tokens_per_gib is less than 1; give the tokens whose KV a GiB holds")
    steps = None if data.get("steps") is None else StepTimes.from_dict(data["steps"])
    assumed = tuple(f"{key} {value:,g}" for key, value in _OF_KV.items() if key not in data)
    return Testbed(
        name, cost, base_s, int(tokens_per_gib), host_gib_per_s, disk_gib_per_s, assumed=assumed, steps=steps
    )
