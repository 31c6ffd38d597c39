"""What is simulated: every setting of a run, validated when it is made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Literal, Self, get_args

from ragcache_core.errors import ConfigError
from ragcache_core.ordering import DOCUMENT_ORDERS, DocumentOrder
from ragcache_core.policy import POLICIES

Granularity = Literal["document", "block"]
"""What is kept and given up as one: a whole document, as the paper's Algorithm 1 does, or a block, as vLLM does."""
FrequencyScope = Literal["ghost", "cached"]
"""How long a document's uses count: beyond its eviction, as in the engine, or as long as it is cached."""
Queue = Literal["fifo", "cache-aware"]
Beyond = Literal["extrapolate", "refuse"]
Speculation = Literal["none", "dynamic"]
Routing = Literal["round-robin", "power-of-two", "hash", "bounded", "vllm-router", "mirror", "joint"]
ROUTINGS: tuple[Routing, ...] = get_args(Routing)
"""Who chooses a request's replica: its turn; the less busy of two; its first document, in bounds or not; what each was
sent before, as vllm-router's ``cache_aware``; what replicas have of its prompt, or of the order of its documents that
suits each of them."""

MAX_REPLICAS = 1_024
BELADY, INFINITE = "belady", "infinite"
SIMULATED_POLICIES = (*POLICIES, BELADY, INFINITE)
"""The policies that an engine has, and two bounds: one that knows the future, and a cache that holds everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """Everything that decides a run besides its trace.

    Attributes:
        policy: one of :data:`SIMULATED_POLICIES`.
        order: in which order a prompt shows its documents.
        gpu_tokens, host_tokens, disk_tokens: how many tokens of KV each tier holds; 0 of host or disk: no such tier.
        system_tokens: of the prompt that all requests share, before the documents.
        cost_model: a name of :data:`~ragcache_core.sim.testbeds.TESTBEDS` or ``MEASURED``, or a JSON file.
        beyond: what to do where the trace has longer prompts than a measured profile.
        queue: which of those that wait is next; ``window`` bounds how often one is overtaken.
        granularity: documents, or blocks of ``block_size`` tokens.
        retrieval_s: from a request's arrival until its documents are known. ``search`` is a file of measured searches,
            of which each request draws one instead.
        max_batch: requests that the engine runs at a time.
        max_batched_tokens: that a step of the engine computes, as vLLM schedules them; None: iterations of whole
            prompts. Of blocks alone.
        frequency: whether uses are counted beyond eviction; None: as the paper has it for ``pgdsf`` (not), and as the
            engine has it for all others.
        ghost_size: evicted documents whose uses are remembered.
        max_cached_documents: of a prompt, that are stored below the GPU; those behind them are the first to go. None:
            all. Of blocks alone.
        knows_documents: whether documents are told from the rest of a prompt; without, blocks are kept as vLLM does.
        overlaps_transfers: whether KV is loaded layer by layer while the layers before are computed.
        speculation: whether candidates of a search that goes on are prefilled in idle time.
        settle_shares: for each stage of a search, the share of searches whose candidates are the final ones from then
            on; what is missing to 1 settles with the last stage.
        max_prefill_bs: requests in the engine with which no speculative one is admitted.
        chunk_reuse: the fraction of a document to compute that is reused behind others than it was computed behind;
            None: documents are cached after exact prefixes alone.
        chunk_share: of host and disk, for chunks that may be reused so; the rest is for exact prefixes.
        replicas: engines, each with tiers of the sizes above, among which ``routing`` divides the requests.
        routing: one of :data:`ROUTINGS`; ``mirror`` and ``joint`` go by what each replica had cached when its last
            request ended, and ``joint`` is what a ``Fleet`` does.
        shared_tokens: of a pool below the replicas' own tiers, which all of them fill and read; 0: there is none.
        link_gib_per_s: at which each replica reads from that pool.
        warm_up: requests at the beginning that are served and not counted.
        seed: of what is drawn besides the trace: when candidates settle.

    Raises:
        ConfigError: a value that cannot work, or two that contradict each other.
    """

    policy: str = "tournament"
    order: DocumentOrder = "retrieval"
    gpu_tokens: int = 40_960
    host_tokens: int = 65_536
    disk_tokens: int = 0
    system_tokens: int = 0
    cost_model: str = "a10g-mistral-7b"
    beyond: Beyond = "extrapolate"
    queue: Queue = "fifo"
    window: int = 32
    granularity: Granularity = "document"
    block_size: int = 16
    retrieval_s: float = 0.08
    search: str | None = None
    max_batch: int = 1
    max_batched_tokens: int | None = None
    frequency: FrequencyScope | None = None
    ghost_size: int = 100_000
    max_cached_documents: int | None = None
    knows_documents: bool = True
    overlaps_transfers: bool = True
    speculation: Speculation = "none"
    settle_shares: tuple[float, ...] = (0.25, 0.25, 0.25, 0.25)
    max_prefill_bs: int = 4
    chunk_reuse: float | None = None
    chunk_share: float = 0.5
    replicas: int = 1
    routing: Routing = "joint"
    shared_tokens: int = 0
    link_gib_per_s: float | None = None
    warm_up: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        _check_choice("policy", self.policy, SIMULATED_POLICIES)
        _check_choice("order", self.order, DOCUMENT_ORDERS)
        _check_choice("beyond", self.beyond, get_args(Beyond))
        _check_choice("queue", self.queue, get_args(Queue))
        _check_choice("granularity", self.granularity, get_args(Granularity))
        _check_choice("speculation", self.speculation, get_args(Speculation))
        if self.frequency is not None:
            _check_choice("frequency", self.frequency, get_args(FrequencyScope))
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} is {value!r}; it must be a whole number, {least} or more")
        if not _is_number(self.retrieval_s):
            raise ConfigError(f"retrieval_s is {self.retrieval_s!r}; it must be 0 or more seconds")
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
        self._check_steps()
        self._check_fleet()
        self._check_chunks()
        self._check_max_cached_documents()
        if self.policy == BELADY and self.granularity == "block":
            raise ConfigError(
                "policy belady knows when documents come again, and not their blocks: choose granularity document, or "
                "another policy"
            )
        if self.policy == BELADY and self.order == "cache_aware":
            raise ConfigError(
                "belady knows when an order of documents comes again, and cache_aware orders are not known ahead: "
                "choose order retrieval or canonical, or another policy"
            )

    def _check_max_cached_documents(self) -> None:
        limit = self.max_cached_documents
        if limit is None:
            return
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise ConfigError(f"max_cached_documents is {limit!r}; it must be a whole number, 1 or more, or left out")
        if self.granularity != "block":
            raise ConfigError(
                f"max_cached_documents is {limit}, which the engine has and Algorithm 1 has not: choose granularity "
                "block, or leave it out"
            )

    def _check_steps(self) -> None:
        limit = self.max_batched_tokens
        if not self.knows_documents and self.granularity != "block":
            raise ConfigError("knows_documents is False, and whole documents are kept: choose granularity block")
        if limit is None:
            return
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < self.max_batch:
            raise ConfigError(
                f"max_batched_tokens is {limit!r}; a step computes a token of each of max_batch {self.max_batch} "
                "requests at least: raise it, or leave it out"
            )
        for name, needed in (("granularity", "block"), ("speculation", "none"), ("chunk_reuse", None)):
            if (value := getattr(self, name)) != needed:
                raise ConfigError(
                    f"{name} is {value}, which steps of max_batched_tokens are not simulated with: "
                    + ("leave it out" if needed is None else f"choose {needed}")
                )

    def _check_fleet(self) -> None:
        _check_choice("routing", self.routing, ROUTINGS)
        if self.replicas > MAX_REPLICAS:
            raise ConfigError(f"replicas is {self.replicas:,}; at most {MAX_REPLICAS:,} are simulated: lower it")
        link = self.link_gib_per_s
        if link is not None and not (_is_number(link) and link > 0.0):
            raise ConfigError(f"link_gib_per_s is {link!r}; it must be more than 0 GiB a second")
        if self.shared_tokens and link is None:
            raise ConfigError(
                f"shared_tokens is {self.shared_tokens:,} and nothing says how fast they are read: set "
                "link_gib_per_s to the GiB that a replica reads in a second"
            )
        if link is not None and not self.shared_tokens:
            raise ConfigError(
                f"link_gib_per_s is {link:g} and there is no shared tier to read: set shared_tokens as well"
            )
        if not self.is_fleet:
            return
        for name, needed in (("granularity", "document"), ("speculation", "none"), ("chunk_reuse", None)):
            if (value := getattr(self, name)) != needed:
                raise ConfigError(
                    f"{name} is {value}, which replicas and a shared tier are not simulated with: "
                    + ("leave it out" if needed is None else f"choose {needed}")
                )
        if self.policy == BELADY:
            raise ConfigError(
                "belady knows when documents come again, and not at which of the replicas: choose another policy, or "
                "one replica"
            )

    def _check_chunks(self) -> None:
        for name, value in (("chunk_reuse", self.chunk_reuse), ("chunk_share", self.chunk_share)):
            if value is not None and not (_is_number(value) and value <= 1.0):
                raise ConfigError(f"{name} is {value!r}; it must be a fraction from 0 to 1")
        if self.chunk_reuse is None:
            return
        if self.policy == BELADY:
            raise ConfigError("belady knows when an order of documents comes again, and not a document: choose another")
        if not int(self.host_tokens * self.chunk_share):
            raise ConfigError(
                f"chunk_reuse keeps chunks in host memory, and chunk_share {self.chunk_share:g} of host_tokens "
                f"{self.host_tokens:,} holds none: raise them, or leave chunk_reuse out"
            )

    @property
    def is_fleet(self) -> bool:
        """Whether there is more than one engine with tiers of its own."""
        return self.replicas > 1 or self.shared_tokens > 0

    @property
    def keeps_frequency(self) -> bool:
        """Whether a document's uses are counted beyond its eviction."""
        return (self.frequency or ("cached" if self.policy == "pgdsf" else "ghost")) == "ghost"

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data."""
        return {**asdict(self), "settle_shares": list(self.settle_shares)}

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Self:
        """Return the options that :meth:`to_dict` wrote.

        Raises:
            ConfigError: there is no such option, or its value cannot work.
        """
        names = [field.name for field in fields(cls)]
        for name in data:
            if name not in names:
                raise ConfigError(f"there is no option {name!r}; use some of {', '.join(names)}")
        settings = dict(data)
        if isinstance(shares := settings.get("settle_shares"), list):
            settings["settle_shares"] = tuple(shares)
        return cls(**settings)  # type: ignore[arg-type]


_LEAST = {
    "gpu_tokens": 1,
    "host_tokens": 0,
    "disk_tokens": 0,
    "system_tokens": 0,
    "window": 0,
    "block_size": 1,
    "max_batch": 1,
    "ghost_size": 0,
    "max_prefill_bs": 0,
    "replicas": 1,
    "shared_tokens": 0,
    "warm_up": 0,
    "seed": 0,
}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0.0 <= value < math.inf


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(choices)}")
