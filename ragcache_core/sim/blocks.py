"""The simulated cache: blocks of KV in tiers, as with vLLM and RAGCache's plugin."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from ragcache_core.errors import ConfigError
from ragcache_core.ordering import CachedPaths, DocPath, PathChange, arrange
from ragcache_core.policy import PrefillCost, ReplacementPolicy, make_policy
from ragcache_core.sim.belady import BeladyPolicy, Foreseen
from ragcache_core.sim.block_tiers import DiskBlocks, GPUBlocks, HeldBlocks, HostBlocks
from ragcache_core.sim.chunks import SimulatedChunks
from ragcache_core.sim.engine import NO_REUSE, NO_STATIC_PREFIX, Reuse, Served
from ragcache_core.sim.options import BELADY, INFINITE, SimulationOptions
from ragcache_core.sim.prompt_blocks import History, PromptBlocks, cut_into_blocks
from ragcache_core.sim.traces.trace import Trace, TracedRequest
from ragcache_core.tree import KnowledgeTree, PathSegment, Retention, TreeNode
from ragcache_core.tree.changes import NodeChanges
from ragcache_core.types import Tier

_UNBOUNDED_TOKENS = 1 << 40


@dataclass(slots=True, eq=False)
class BlockRun:
    """The progress of a request in the engine.

    Attributes:
        tiers: tiers of its hit blocks.
        num_computed: prompt tokens on the GPU, or in transfer to it.
        num_answered: answer tokens with KV on the GPU.
        num_named: number of its full blocks, which others can hit.
        stored: its blocks that were copied to the host.
        num_storable: number of its blocks to copy to the host, including the answer's.
        turn: turn of its conversation, and whether that is likely to continue.
        expected_uses: expected uses of documents stored in advance; ``None`` for a request.
        reuse: its chunk reuse.
        num_exact: number of its blocks that others may hit when full.
        held: its blocks on the GPU. ``promised``: blocks kept for it in lower tiers until loaded.
    """

    prompt: PromptBlocks
    request: TracedRequest
    number: int | None
    tiers: list[Tier] = field(default_factory=list)
    num_computed: int = 0
    num_answered: int = 0
    num_named: int = 0
    stored: list[Hashable] = field(default_factory=list)
    num_storable: int = 0
    turn: int = 1
    is_likely: bool = False
    expected_uses: int | None = None
    reuse: Reuse = NO_REUSE
    num_exact: int = sys.maxsize
    held: HeldBlocks = field(default_factory=HeldBlocks)
    promised: Sequence[Hashable] = ()

    @property
    def num_remaining(self) -> int:
        """Number of prompt tokens still to compute."""
        return self.prompt.num_prompt_tokens - self.num_computed


class BlockCache:
    """Stores and evicts blocks of KV as RAGCache's engine does (vLLM 0.32 and ``vllm_plugin``).

    For a request, in this order:

    1. its path is put into the tree (:meth:`enter`);
    2. it hits what the GPU has from the first block on, but for its last token's block, and then what host and disk
       have. It gets its blocks: spare ones, then evicted ones. What was hit below the GPU is copied into some of them
       (:meth:`begin`, :meth:`load`);
    3. its access is counted. What it computes enters the GPU tier as soon as it has blocks for it. Its prompt is copied
       to the host, and from there to the disk, where it is not there already: up to the end of the documents, if there
       are any, and as far as the host holds it (:meth:`compute`);
    4. blocks of its answer are allocated one by one, and become full and known. A full one that is worth it is copied
       to the host when the next one is allocated, or at the end (:meth:`answer`);
    5. it frees its blocks, the last ones first (:meth:`end`).

    :meth:`serve` does all of it at once: a prompt is computed in one step, and while it is loaded where transfers are
    overlapped. Transfers are done when the next request comes, and a running request ends before the next one is
    served. The system prompt is part of the path, and one block of the GPU is vLLM's null block.
    """

    def __init__(self, options: SimulationOptions, cost: PrefillCost, *, trace: Trace | None = None) -> None:
        """Start empty.

        Args:
            options: of the run.
            cost: of a prefill.
            trace: the future, which the policy ``belady`` needs.

        Raises:
            ConfigError: a tier is smaller than a block.
        """
        is_infinite = options.policy == INFINITE
        self.block_size = options.block_size
        self._options = options
        self._cost = cost
        self._chunks = None
        if options.chunk_reuse is not None:
            self._chunks = SimulatedChunks(options, cost, page_tokens=options.block_size)
        num_chunk_host, num_chunk_disk = options.chunk_tokens
        gpu_tokens = _UNBOUNDED_TOKENS if is_infinite else options.gpu_tokens
        num_gpu = self._num_blocks("gpu_tokens", gpu_tokens, least=2)
        num_host = self._num_blocks("host_tokens", 0 if is_infinite else options.host_tokens - num_chunk_host)
        num_disk = self._num_blocks("disk_tokens", 0 if is_infinite else options.disk_tokens - num_chunk_disk)
        self._tree = KnowledgeTree(
            self._make_policy(options, cost, trace),
            keeps_frequency=options.keeps_frequency,
        )
        self._gpu = GPUBlocks(self._tree, num_gpu, self.block_size)
        disk = DiskBlocks(self._tree, num_disk) if num_disk else None
        self._host = HostBlocks(self._tree, num_host, disk) if num_host else None
        num_retained = int(options.retained_share * min(each for each in (num_gpu, num_host, num_disk) if each))
        self._retention = Retention(self._tree, lambda _: num_retained)
        self._next_turn_s = None if trace is None or not options.retain_s else next_turn_s(trace)
        self._histories: dict[int, History] = {}
        self.mirror = CachedPaths(_UNBOUNDED_TOKENS)
        self._mirrored: dict[TreeNode, DocPath] = {}
        self._changed: set[TreeNode] = set()
        if options.replicas > 1:
            self._tree.changes = NodeChanges()
            self._changed = self._tree.changes.subscribe()

    def _make_policy(self, options: SimulationOptions, cost: PrefillCost, trace: Trace | None) -> ReplacementPolicy:
        if options.policy == BELADY:
            assert trace is not None, "the bound needs to know the future"
            return BeladyPolicy(_foreseen(trace, options))
        return make_policy("lru" if options.policy == INFINITE else options.policy, cost)

    @property
    def tree(self) -> KnowledgeTree:
        """The tree, for inspection."""
        return self._tree

    def num_cached_tokens(self, request: TracedRequest) -> int:
        """Return the number of cached prompt tokens in any tier, without side effects."""
        prompt = self._cut(request, None)
        num_units = self._num_cached_units(prompt.keys)
        return min(num_units, max(prompt.num_prompt_tokens - 1, 0) // self.block_size) * self.block_size

    def best_order(self, request: TracedRequest) -> tuple[int, ...]:
        """Return the permutation of documents with the longest cached prefix, without side effects."""
        paths = CachedPaths()
        self._explore(request, (), 0, paths)
        return arrange(request.doc_ids, "cache_aware", paths, prefix=NO_STATIC_PREFIX)

    def serve(self, request: TracedRequest, number: int) -> Served:
        """Return a request's hits; count it, and update the tiers.

        Args:
            request: with its documents in the order in which the prompt shows them.
            number: of the request in the trace.

        Raises:
            ConfigError: the GPU has not enough blocks for it, as vLLM would refuse it.
        """
        return self._serve(self.enter(request, number))

    def warm(self, request: TracedRequest, expected_uses: int) -> None:
        """Store the documents of a prompt in advance, ranked as if used that many times.

        Raises:
            ConfigError: the GPU has not enough blocks for it.
        """
        run = self.enter(request, None)
        run.expected_uses = expected_uses
        self._serve(run)

    def _serve(self, run: BlockRun) -> Served:
        self.begin(run, loads_by_layer=self._options.overlaps_transfers)
        if self._options.overlaps_transfers:  # loaded blocks stay in host memory until the prompt is computed
            self.compute(run, run.num_remaining)
            self.load(run)
        else:
            self.load(run)
            self.compute(run, run.num_remaining)
        for step in self._busy_steps(run.prompt):
            if step > 1:
                self.settle()
            run.num_answered = step - 1
            self.answer(run)
        self.settle()
        self.end(run)
        self.settle()
        return self.served(run)

    # A request's way

    def enter(self, request: TracedRequest, number: int | None) -> BlockRun:
        """Return a queued request. Without a number it is a prefix of documents.

        Raises:
            ConfigError: the GPU has not enough blocks for it, as vLLM would refuse it.
        """
        self._tree.now_s = max(self._tree.now_s, request.arrival_s)
        self._retention.tick()
        prompt = self._cut(request, number)
        self._check_fits(prompt, number)
        self._tree.insert(prompt.path)
        run = BlockRun(prompt, request, number)
        if prompt.path:
            self._tree.retain(prompt.path[-1].keys[-1])
        return run

    def begin(self, run: BlockRun, max_tokens: int = sys.maxsize, *, loads_by_layer: bool = False) -> None:
        """Give a request its blocks, for at most ``max_tokens`` to compute.

        It is to :meth:`load` next, and then to :meth:`compute` what is left. If it ``loads_by_layer``, it computes
        while it loads: it has blocks for both, and computes its last token's block, which it hit, too.
        """
        prompt, size = run.prompt, self.block_size
        num_tokens = prompt.num_prompt_tokens
        keys = prompt.keys[: num_tokens // size]
        most = (num_tokens - 1) // size
        num_local = self._gpu.num_leading(keys[:most])
        below = [] if self._host is None else self._host.look_up(keys[num_local:])
        run.promised = keys[num_local : num_local + len(below)]
        if loads_by_layer:
            below = below[: most - num_local]
        run.tiers, run.num_named = [Tier.GPU] * num_local + below, num_local
        if run.expected_uses is None:
            is_likely = self._tree.returning.is_likely(self._tree.conversations.turn_of(keys))
            run.is_likely = is_likely or self._retained_s(run) > 0.0
            self._retention.on_used(keys)
            self._reuse(run)
        elif self._chunks is not None:
            self._chunks.warm(run.request, run.expected_uses)
        run.held = self._gpu.use(keys[:num_local])
        run.num_computed = min(len(run.tiers) * size, num_tokens - 1)  # a fully cached prompt recomputes its last token
        run.num_answered = 0
        if below and not loads_by_layer:  # the rest of the prompt gets its blocks once these are loaded
            self._gpu.take(run.held, len(below))
        else:
            self._fill(run, min(num_tokens, run.num_computed + max_tokens))
        self._count_access(run)

    def load(self, run: BlockRun) -> None:
        """Record that a request's loads from below the GPU have ended."""
        if run.promised:
            assert self._host is not None
            self._host.release(run.promised)
            run.promised = ()
            self._name(run, len(run.tiers))

    def compute(self, run: BlockRun, num_tokens: int) -> None:
        """Compute tokens of the prompt, and copy it to the host when it is complete."""
        num_prompt_tokens = run.prompt.num_prompt_tokens
        run.num_computed += num_tokens
        self._fill(run, run.num_computed)
        if run.num_computed == num_prompt_tokens and self._host is not None:
            is_loaded = len(run.tiers) > run.tiers.count(Tier.GPU)
            first = len(run.tiers) if is_loaded else 0  # vLLM passes over all that was hit, on the GPU too
            run.num_storable = min(self._num_storable_blocks(run), run.num_exact)
            last = min(run.num_storable, num_prompt_tokens // self.block_size)
            self._store(run, run.prompt.keys[first:last])

    def answer(self, run: BlockRun) -> None:
        """Compute the KV of the previous step's answer token; the last token needs none."""
        size, num_tokens = self.block_size, run.prompt.num_prompt_tokens + run.num_answered
        if num_tokens % size == 0:
            self._gpu.take(run.held, 1)
            self._store_answer(run, num_tokens)
        run.num_answered += 1
        self._name(run, (num_tokens + 1) // size)

    def _store_answer(self, run: BlockRun, num_tokens: int) -> None:
        """Copy the answer's block filled by the first ``num_tokens`` to the host, a step after it became full."""
        num_full = num_tokens // self.block_size
        if self._host is not None and run.prompt.num_prompt_tokens // self.block_size < num_full <= run.num_storable:
            self._store(run, run.prompt.keys[num_full - 1 : num_full])

    def _store(self, run: BlockRun, keys: Sequence[int]) -> None:
        assert self._host is not None
        run.stored += self._host.store(keys)

    def settle(self) -> None:
        """Record that the copies to the host have ended, a step after they began."""
        if self._host is not None:
            self._host.settle()

    def end(self, run: BlockRun) -> None:
        """Record that a request was answered."""
        prompt = run.prompt
        if prompt.answer_key is not None:
            self._tree.record_answer(prompt.answer_key, run.turn)
        if prompt.path:
            self._tree.release(prompt.path[-1].keys[-1])
        if (num_tokens := prompt.num_prompt_tokens + run.num_answered) % self.block_size == 0:
            self._store_answer(run, num_tokens)
        self._free(run)
        if (retain_s := self._retained_s(run)) and (num_known := min(run.num_named, run.num_exact)):
            self._retention.retain(prompt.keys[num_known - 1], retain_s)
        if run.request.conversation is not None:
            self._histories[run.request.conversation] = prompt.history

    def _retained_s(self, run: BlockRun) -> float:
        """Return how long a turn is to be retained: until the next one, if that comes in time; else 0."""
        if self._next_turn_s is None or run.number is None:
            return 0.0
        next_s = float(self._next_turn_s[run.number]) - run.request.arrival_s
        return next_s if next_s <= self._options.retain_s else 0.0

    def _free(self, run: BlockRun) -> None:
        self._gpu.free(run.held)
        run.held = HeldBlocks()

    def _fill(self, run: BlockRun, num_tokens: int) -> None:
        """Give a request blocks for the first ``num_tokens`` of its prompt."""
        self._gpu.take(run.held, max(-(-num_tokens // self.block_size) - run.held.num_blocks, 0))
        self._name(run, num_tokens // self.block_size)

    def _reuse(self, run: BlockRun) -> None:
        """Reuse chunks; blocks from the first approximate token on are private to the request."""
        if self._chunks is not None:
            run.reuse = self._chunks.serve(run.request, len(run.tiers) * self.block_size)
        if run.reuse.first_token is not None:
            run.num_exact = run.reuse.first_token // self.block_size

    def _count_access(self, run: BlockRun) -> None:
        num_cached = len(run.tiers) * self.block_size + run.reuse.num_tokens
        num_missed = run.prompt.num_prompt_tokens - num_cached
        policy, path = self._tree.policy, self._path(run.prompt)
        cost_s = policy.cost_per_token_s(self._cost, num_cached, num_missed)
        if run.expected_uses is not None:
            self._tree.record_prefill(path, num_hit_units=len(run.tiers), cost_per_token_s=cost_s)
            self._tree.seed(path, expected_uses=run.expected_uses)
            return
        if isinstance(policy, BeladyPolicy):
            assert run.number is not None
            policy.begin(run.number)
        keys = run.prompt.keys[: run.prompt.num_prompt_tokens // self.block_size]
        run.turn = self._tree.conversations.on_access(keys, self._tree.num_requests)
        self._tree.record_access(path, num_hit_units=len(run.tiers), cost_per_token_s=cost_s, turn=run.turn)

    def _path(self, prompt: PromptBlocks) -> Sequence[TreeNode]:
        """Return the nodes of an entered prompt."""
        path = self._tree.retained_path(prompt.path[-1].keys[-1]) if prompt.path else []
        return self._tree.insert(prompt.path) if path is None else path

    def _busy_steps(self, prompt: PromptBlocks) -> list[int]:
        """Return the steps of an answer in which a block begins or becomes full; nothing happens in others."""
        size, first, last = self.block_size, prompt.num_prompt_tokens, prompt.num_tokens
        begun = range(-(-first // size) * size + 1, last + 1, size)
        full = range((first // size + 1) * size, last + 1, size)
        return sorted({num_tokens - first for num_tokens in (*begun, *full)})

    def _name(self, run: BlockRun, num_full: int) -> None:
        num_full = min(num_full, run.num_exact)
        self._gpu.name(run.held, run.prompt.keys, run.num_named, num_full)
        run.num_named = max(run.num_named, num_full)

    def _num_storable_blocks(self, run: BlockRun) -> int:
        """Return the number of a request's blocks that are stored below the GPU."""
        assert self._host is not None
        prompt = run.prompt
        num_blocks, num_documents = prompt.num_document_blocks, len(prompt.history.documents)
        if run.is_likely and num_documents <= (self._options.max_cached_documents or num_documents):
            num_blocks = len(prompt.keys)
        elif num_blocks is None:
            num_blocks = prompt.num_prompt_tokens // self.block_size
        return min(num_blocks, self._host.num_blocks)

    # Inside

    def _cut(self, request: TracedRequest, number: int | None) -> PromptBlocks:
        return _cut(request, number, self._options, self._history(request))

    def _history(self, request: TracedRequest) -> History:
        """Return the history of a turn; a turn that overtook the previous one has its own tokens."""
        if request.conversation is None or not request.history_tokens:
            return History()
        num_tokens = self._options.system_tokens + request.history_tokens
        known = self._histories.get(request.conversation, History())
        return known if known.num_tokens == num_tokens else History(((num_tokens, b"overtaken"),))

    def served(self, run: BlockRun) -> Served:
        """Return the hits of a request at its start."""
        prompt, tiers = run.prompt, run.tiers
        by_tier = tuple(tiers.count(tier) * self.block_size for tier in Tier)
        return Served(
            tiers=tuple(
                max(tiers[document.first : document.num_needed]) if document.num_needed <= len(tiers) else None
                for document in prompt.documents
            ),
            num_cached_tokens_by_tier=(by_tier[0], by_tier[1], by_tier[2]),
            num_new_tokens=prompt.num_prompt_tokens - sum(by_tier) - run.reuse.num_tokens,
            num_loaded_tokens=by_tier[Tier.HOST] + by_tier[Tier.DISK],
            num_swapped_out_tokens=len(run.stored) * self.block_size,
            reuse=run.reuse,
        )

    def _num_cached_units(self, keys: Sequence[int]) -> int:
        return self._tree.match_prefix([PathSegment(keys, len(keys) * self.block_size)]).num_units

    def _explore(self, request: TracedRequest, chosen: tuple[int, ...], num_cached: int, paths: CachedPaths) -> None:
        """Add all document orders with a longer cached prefix than ``num_cached`` to ``paths``.

        A document that fills no block of its own ends where the one before it does, and others may follow it.
        """
        for i in range(len(request.doc_ids)):
            if i in chosen:
                continue
            order = (*chosen, i)
            doc_ids = tuple(request.doc_ids[k] for k in order)
            lengths = tuple(request.doc_tokens[k] for k in order)
            shown = replace(request, doc_ids=doc_ids, doc_tokens=lengths, question_tokens=0)
            keys = self._cut(shown, None).keys
            num_units = self._num_cached_units(keys)
            is_whole = num_units == len(keys)
            if num_units > num_cached or is_whole:
                paths.set(PathChange(NO_STATIC_PREFIX, doc_ids, num_units * self.block_size))
            if is_whole:
                self._explore(request, order, num_units, paths)

    def update_mirror(self) -> None:
        """Update :attr:`mirror`, the cached document orders; only with several replicas."""
        changed = list(self._changed)
        self._changed.clear()
        here = []
        for node in changed:
            at = self._tree.locate(node.keys[-1])
            if at is not None and at.node is node:
                here.append(node)
            elif (documents := self._mirrored.pop(node, None)) is not None:
                self.mirror.set(PathChange(NO_STATIC_PREFIX, documents, 0))
        for node in here:
            if node.doc_id is not None:
                self._mirror(node)

    def _mirror(self, node: TreeNode) -> None:
        """Return the cached part of a document, which may span several nodes."""
        parts = [node]
        while (upper := parts[0].parent) is not None and upper.doc_id == node.doc_id:
            parts.insert(0, upper)
        while (lower := next((n for n in parts[-1].iter_children() if n.doc_id == node.doc_id), None)) is not None:
            parts.append(lower)
        first = num_tokens = parts[0].start * self.block_size
        for part in parts:
            num_tokens += self._tree.num_own_leading_tokens(part)
            if num_tokens < (part.start + len(part.keys)) * self.block_size:
                break
        is_whole = num_tokens == (parts[-1].start + len(parts[-1].keys)) * self.block_size
        steps = parts[0].path()
        documents = tuple(
            step.doc_id
            for before, step in zip((None, *steps), steps, strict=False)
            if step.doc_id is not None and (before is None or before.doc_id != step.doc_id)
        )
        num_cached = num_tokens if num_tokens > first else 0
        self.mirror.set(PathChange(NO_STATIC_PREFIX, documents, num_cached, is_whole))
        self._mirrored[parts[-1]] = documents

    def _check_fits(self, prompt: PromptBlocks, number: int | None) -> None:
        num_needed = -(-prompt.num_tokens // self.block_size)
        if num_needed > self._gpu.num_usable:
            name = "a path" if number is None else f"request {number} of the trace"
            raise ConfigError(
                f"{name} needs {num_needed:,} blocks of {self.block_size} tokens, the GPU has {self._gpu.num_usable:,} "
                f"and vLLM would refuse it: set gpu_tokens to {(num_needed + 1) * self.block_size:,} or more"
            )

    def _num_blocks(self, name: str, num_tokens: int, least: int = 1) -> int:
        num_blocks = num_tokens // self.block_size
        if num_blocks < least and (num_tokens or least > 1):
            raise ConfigError(
                f"{name} is {num_tokens:,}; blocks hold {self.block_size} tokens, and {least} must fit: set it to "
                f"{least * self.block_size:,} or more"
            )
        return num_blocks


def _cut(request: TracedRequest, number: int | None, options: SimulationOptions, history: History) -> PromptBlocks:
    return cut_into_blocks(
        request,
        number,
        system_tokens=options.system_tokens,
        block_size=options.block_size,
        max_cached_documents=options.max_cached_documents,
        history=history,
    )


def next_turn_s(trace: Trace) -> npt.NDArray[np.float64]:
    """Return when the next turn of each request's conversation arrives: [n]; never is infinite."""
    order = np.argsort(trace.conversation, kind="stable")
    turns = trace.conversation[order]
    goes_on = (turns[:-1] == turns[1:]) & (turns[:-1] >= 0)
    next_s = np.full(len(trace), np.inf)
    next_s[order[:-1][goes_on]] = trace.arrival_s[order[1:][goes_on]]
    return next_s


def _foreseen(trace: Trace, options: SimulationOptions) -> Iterator[Foreseen]:
    """Yield the future uses of each request in a trace, without overtaking."""
    histories: dict[int, History] = {}
    for number, request in enumerate(trace):
        shown = request.in_order(arrange(request.doc_ids, options.order, None))
        history = History() if request.conversation is None else histories.get(request.conversation, History())
        prompt = _cut(shown, number, options, history)
        ends = accumulate(segment.num_tokens for segment in prompt.path)
        steps = [(segment.keys[-1], end) for segment, end in zip(prompt.path, ends, strict=True)]
        answer = prompt.keys[-1:] or ("",)
        blocks = {min(end // options.block_size, len(prompt.keys)) for end, _ in prompt.history.runs}
        yield Foreseen([*steps, (answer[0], _UNBOUNDED_TOKENS)], {prompt.keys[i - 1] for i in blocks if i})
        if request.conversation is not None:
            histories[request.conversation] = prompt.history
