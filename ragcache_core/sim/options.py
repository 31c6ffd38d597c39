"""The settings of a simulation, validated on creation."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import ClassVar, Literal, get_args

from ragcache_core.errors import ConfigError
from ragcache_core.ordering import DOCUMENT_ORDERS, DocumentOrder
from ragcache_core.policy import POLICIES

Queue = Literal["fifo", "cache-aware"]
Speculation = Literal["none", "dynamic"]
ROUTINGS = ("round-robin", "joint")
BELADY, INFINITE = "belady", "infinite"
SIMULATED_POLICIES = (*POLICIES, BELADY, INFINITE)
"""The engine's policies and two bounds: ``belady`` knows the future, ``infinite`` has endless GPU memory."""

MAX_REPLICAS = 1_024


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """All settings of a simulation besides its trace.

    Raises:
        ConfigError: a value is invalid, or two contradict each other.
    """

    routings: ClassVar[tuple[str, ...]] = ROUTINGS

    policy: str = "mixture"
    """Replacement policy of all tiers; belady (which knows the future) and infinite (which never evicts) are bounds."""

    order: DocumentOrder = "retrieval"
    """Document order in prompts; all but retrieval change prompts."""

    gpu_tokens: int = 40_960
    """Size of the GPU KV cache, in tokens."""

    host_tokens: int = 65_536
    """Size of the host tier, in tokens; 0 for none."""

    disk_tokens: int = 0
    """Size of the disk tier, in tokens; 0 for none."""

    system_tokens: int = 0
    """Length in tokens of the system prompt, which all requests share before their documents."""

    cost_model: str = "a10g-mistral-7b"
    """Prefill times that are assumed: a10g-mistral-7b, a10g-llama2-7b, h800-mixtral-8x7b, h800-llama2-70b,
    h100-llama3-8b, or a file of 'ragcache profile --output'."""

    queue: Queue = "fifo"
    """Scheduling order of waiting requests: fifo by arrival, cache-aware by cached tokens per token to compute."""

    window: int = 32
    """Number of later requests that may overtake a waiting request in the cache-aware queue."""

    block_size: int = 16
    """Tokens in a KV block."""

    retrieval_s: float = 0.08
    """Duration of a search, in seconds: from a request's arrival until its documents are known."""

    search: str | None = None
    """JSON file of measured search times, such as {"search_s": [0.12, 0.31]}; each request draws one instead of
    ``retrieval_s``."""

    max_batch: int = 1
    """Maximum number of requests that an engine runs at a time."""

    max_cached_documents: int | None = None
    """Number of documents of each prompt that are stored below the GPU, from the first one on; later ones are evicted
    first. By default all are stored."""

    retain_s: float = 0.0
    """Each turn of a conversation whose next turn arrives within this many seconds has its prompt and answer retained
    until then, as an agent asks that knows how long its tool takes."""

    retained_share: float = 0.25
    """Of the smallest tier, the share that retained prompts and answers may take."""

    overlaps_transfers: bool = True
    """Whether KV is loaded layer by layer, while earlier layers are computed."""

    speculation: Speculation = "none"
    """Whether candidates of a search are prefilled before it ends: none, or dynamic (with spare capacity)."""

    settle_shares: tuple[float, ...] = (0.25, 0.25, 0.25, 0.25)
    """Per stage of a search, the share of searches whose candidates stabilise in it. Searches beyond their sum
    stabilise in the last stage."""

    chunk_reuse: float | None = None
    """Chunk reuse (approximate): share of a reused document that is recomputed, 0 to 1. By default only exact prefixes
    are reused."""

    chunk_share: float = 0.5
    """Share of host and disk tier for chunk reuse, 0 to 1; the rest holds exact prefixes."""

    replicas: int = 1
    """Number of engines, each with tiers of these sizes."""

    routing: str = "joint"
    """Routing of requests to replicas: round-robin, or joint, the choice of a Fleet with the document order."""

    warm_up: int = 0
    """Number of requests at the beginning that are served and not counted."""

    seed: int = 0
    """Random seed of search times drawn from --search, and of the stages in which candidates stabilise."""

    def __post_init__(self) -> None:
        _check_choice("policy", self.policy, SIMULATED_POLICIES)
        _check_choice("order", self.order, DOCUMENT_ORDERS)
        _check_choice("queue", self.queue, get_args(Queue))
        _check_choice("speculation", self.speculation, get_args(Speculation))
        _check_choice("routing", self.routing, self.routings)
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is None and name == "max_cached_documents":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} is {value!r}; it must be a whole number, {least} or more")
        if self.replicas > MAX_REPLICAS:
            raise ConfigError(f"replicas is {self.replicas:,}; at most {MAX_REPLICAS:,} are simulated: lower it")
        for name in ("retrieval_s", "retain_s"):
            if not _is_number(value := getattr(self, name)):
                raise ConfigError(f"{name} is {value!r}; it must be 0 or more seconds")
        if self.disk_tokens and not self.host_tokens:
            raise ConfigError(
                f"disk_tokens is {self.disk_tokens:,} but host_tokens is 0: documents reach the disk through host "
                "memory, so set host_tokens or leave disk_tokens out"
            )
        shares = self.settle_shares
        if not shares or not all(map(_is_number, shares)) or sum(shares) > 1.0 + 1e-9:
            raise ConfigError(
                f"settle_shares are {shares!r}; give a share of 0 or more for each stage, together at most 1"
            )
        self._check_chunks()
        if self.policy == BELADY and (self.order == "cache_aware" or self.replicas > 1 or self.chunk_reuse is not None):
            raise ConfigError(
                "policy belady needs to know every prompt ahead, which order cache_aware, replicas and chunk_reuse "
                "decide while it runs: choose another policy, or leave these out"
            )
        if self.replicas > 1 and self.speculation != "none":
            raise ConfigError(
                f"speculation is {self.speculation}, which is simulated on one engine only: choose none, or one replica"
            )

    def _check_chunks(self) -> None:
        for name in ("chunk_reuse", "chunk_share", "retained_share"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and value <= 1.0):
                raise ConfigError(f"{name} is {value!r}; it must be a fraction from 0 to 1")
        if self.chunk_reuse is not None and not int(self.host_tokens * self.chunk_share):
            raise ConfigError(
                f"chunk_reuse keeps chunks in host memory, and chunk_share {self.chunk_share:g} of host_tokens "
                f"{self.host_tokens:,} holds none: raise them, or leave chunk_reuse out"
            )

    @property
    def keeps_frequency(self) -> bool:
        """Whether a document's uses are counted after its eviction; not for ``pgdsf``, as in the paper."""
        return self.policy != "pgdsf"

    @property
    def chunk_tokens(self) -> tuple[int, int]:
        """Tokens of host and disk for chunk reuse."""
        share = self.chunk_share if self.chunk_reuse is not None else 0.0
        return int(self.host_tokens * share), int(self.disk_tokens * share)

    @property
    def longest_prompt_tokens(self) -> int:
        """Maximum length in tokens of a prompt with its answer on the GPU, without vLLM's null block."""
        return (self.gpu_tokens // self.block_size - 1) * self.block_size

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data."""
        return {**asdict(self), "settle_shares": list(self.settle_shares)}


_LEAST = {
    "gpu_tokens": 1,
    "host_tokens": 0,
    "disk_tokens": 0,
    "system_tokens": 0,
    "window": 0,
    "block_size": 1,
    "max_batch": 1,
    "max_cached_documents": 1,
    "replicas": 1,
    "warm_up": 0,
    "seed": 0,
}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0.0 <= value < math.inf


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(choices)}")
