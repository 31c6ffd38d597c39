"""A cache of blocks over tiers: what vLLM does with RAGCache's plugin, for requests that are served one at a time."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ragcache_core.errors import ConfigError
from ragcache_core.ordering import CachedPaths, PathChange, arrange
from ragcache_core.policy import PrefillCost, make_policy
from ragcache_core.sim.block_tiers import DiskChunks, GPUBlocks, HostChunks
from ragcache_core.sim.cache import NO_REUSE, Reuse, Served, SimulatedCache
from ragcache_core.sim.chunks import StoredChunks
from ragcache_core.sim.options import INFINITE, SimulationOptions
from ragcache_core.sim.prompt_blocks import History, PromptBlocks, cut_into_blocks
from ragcache_core.sim.traces.trace import TracedRequest
from ragcache_core.tree import KnowledgeTree, PathSegment
from ragcache_core.types import Tier

_NO_STATIC_PREFIX = b""
_UNBOUNDED_TOKENS = 1 << 40


@dataclass(slots=True)
class _Run:
    """A request on its way through the engine.

    Attributes:
        tiers: where the blocks lay that it hit.
        num_named: of its blocks are full, and can be found by others.
        num_stored: of its blocks were copied to the host.
        num_storable: of its blocks, those of its answer included, are worth that.
        turn: of its conversation, and whether that is likely to go on.
        reuse: what it takes from chunks.
        num_exact: of its blocks may be found by others, once they are full.
    """

    prompt: PromptBlocks
    tiers: list[Tier]
    num_named: int = 0
    num_stored: int = 0
    num_storable: int = 0
    turn: int = 1
    is_likely: bool = False
    reuse: Reuse = NO_REUSE
    num_exact: int = sys.maxsize


class BlockCache(SimulatedCache):
    """Keeps and gives up blocks of KV as RAGCache's engine does (vLLM 0.32 and ``vllm_plugin``).

    For a request, in this order:

    1. its path is put into the tree, and protected where that would be half of the GPU at most;
    2. it hits what the GPU has from the first block on, but for its last token's block, and then what host and disk
       have. It gets its blocks: spare ones, then what the tree gives up. What was hit below the GPU is copied into
       some of them;
    3. its access is counted. What it computes enters the GPU tier as soon as it has blocks for it. Its prompt is copied
       to the host, and from there to the disk, where it is not there already: up to the end of the documents, if there
       are any, and as far as the host holds it;
    4. blocks of its answer are allocated one by one, and become full and known;
    5. it lets its blocks go, the last ones first.

    A prompt is computed in one step, transfers are done when the next request comes, and a running request ends before
    the next one is served: what overlaps in an engine is not imitated. The system prompt is part of the path, and one
    block of the GPU is vLLM's null block.
    """

    def __init__(
        self,
        options: SimulationOptions,
        cost: PrefillCost,
        *,
        chunks: StoredChunks | None = None,
    ) -> None:
        """Begin empty; ``chunks`` are reused beyond exact prefixes.

        Raises:
            ConfigError: a tier is smaller than a block.
        """
        is_infinite = options.policy == INFINITE
        self._block_size = options.block_size
        self._system_tokens = options.system_tokens
        self._max_cached_documents = options.max_cached_documents
        self._cost = cost
        self._chunks = chunks
        gpu_tokens = _UNBOUNDED_TOKENS if is_infinite else options.gpu_tokens
        num_gpu = self._num_blocks("gpu_tokens", gpu_tokens, least=2)
        num_host = self._num_blocks("host_tokens", 0 if is_infinite else options.host_tokens)
        num_disk = self._num_blocks("disk_tokens", 0 if is_infinite else options.disk_tokens)
        self._tree = KnowledgeTree(
            make_policy("lru" if is_infinite else options.policy, cost),
            ghost_size=options.ghost_size,
            keeps_frequency=options.keeps_frequency,
            shadow_tokens=(num_host or num_gpu) * self._block_size,
        )
        self._gpu = GPUBlocks(self._tree, num_gpu, self._block_size)
        disk = DiskChunks(self._tree, num_disk) if num_disk else None
        self._host = HostChunks(self._tree, num_host, disk) if num_host else None
        self._max_protected_units = num_gpu // 2
        self._histories: dict[int, History] = {}

    @property
    def tree(self) -> KnowledgeTree:
        """The tree, to look at."""
        return self._tree

    # The door

    def num_cached_tokens(self, request: TracedRequest) -> int:
        prompt = self._cut(request, None)
        num_units = self._num_cached_units(prompt.keys)
        return min(num_units, max(prompt.num_prompt_tokens - 1, 0) // self._block_size) * self._block_size

    def best_order(self, request: TracedRequest) -> tuple[int, ...]:
        paths = CachedPaths()
        self._explore(request, (), 0, paths)
        return arrange(request.doc_ids, "cache_aware", paths, prefix=_NO_STATIC_PREFIX)

    def serve(self, request: TracedRequest, number: int) -> Served:
        """Serve a request; see the base class.

        Raises:
            ConfigError: the GPU has not enough blocks for it, as vLLM would refuse it.
        """
        prompt = self._cut(request, number)
        self._check_fits(prompt, number)
        self._tree.insert(prompt.path)
        last = prompt.path[-1].keys[-1] if prompt.path else None
        if last is not None:
            self._tree.retain(last)
        run = self._admit(prompt, request, number)
        self._prefill(run)
        self._answer(run)
        if prompt.answer_key is not None:
            self._tree.conversations.on_answered(prompt.answer_key, run.turn, self._tree.num_requests)
        if last is not None:
            self._tree.release(last)
        self._gpu.free()
        if request.conversation is not None:
            self._histories[request.conversation] = prompt.told
        return self._served(run)

    # A request's way

    def _admit(self, prompt: PromptBlocks, request: TracedRequest, number: int) -> _Run:
        """Return a request whose hits are on the GPU, and whose access is counted."""
        num_tokens, size = prompt.num_prompt_tokens, self._block_size
        keys = prompt.keys[: num_tokens // size]
        end = keys[-1] if keys and len(keys) <= self._max_protected_units else None
        if end is not None:
            self._tree.protect(end)
        num_local = self._gpu.num_leading(keys[: (num_tokens - 1) // size])
        below = [] if self._host is None else self._host.look_up(keys[num_local:])
        run = _Run(prompt, [Tier.GPU] * num_local + below, num_named=num_local)
        run.is_likely = self._tree.returning.is_likely(self._tree.conversations.turn_of(keys))
        run.turn = self._tree.conversations.on_access(keys, self._tree.num_requests)
        self._reuse(run, request, number)
        self._gpu.use(keys[:num_local])
        if below:  # they are loaded first, and the rest of the prompt gets its blocks afterwards
            self._gpu.take(len(below))
        else:
            self._gpu.take(-(-num_tokens // size) - num_local)
            self._name(run, len(keys))
        if end is not None:
            self._tree.unprotect(end)
        self._count_access(run)
        if below:
            assert self._host is not None
            self._host.take_promised()
            self._name(run, len(run.tiers))
        return run

    def _reuse(self, run: _Run, request: TracedRequest, number: int) -> None:
        """Take what chunks have; blocks from the first approximate token on are keyed for no other request."""
        if self._chunks is not None:
            run.reuse = self._chunks.serve(request, number, len(run.tiers) * self._block_size)
        if run.reuse.first_token is not None:
            run.num_exact = run.reuse.first_token // self._block_size

    def _count_access(self, run: _Run) -> None:
        num_cached = len(run.tiers) * self._block_size + run.reuse.num_tokens
        num_missed = run.prompt.num_prompt_tokens - num_cached
        self._tree.record_access(
            self._tree.insert(run.prompt.path),
            num_hit_units=len(run.tiers),
            cost_per_token_s=self._tree.policy.cost_per_token_s(self._cost, num_cached, num_missed),
            turn=run.turn,
        )

    def _prefill(self, run: _Run) -> None:
        """Compute what was not hit, and copy the prompt to the host."""
        num_tokens = run.prompt.num_prompt_tokens
        self._gpu.take(-(-num_tokens // self._block_size) - self._gpu.num_in_use)
        self._name(run, num_tokens // self._block_size)
        if self._host is not None:
            is_loaded = len(run.tiers) > run.tiers.count(Tier.GPU)
            first = len(run.tiers) if is_loaded else 0  # vLLM passes over all that was hit, on the GPU too
            run.num_storable = min(self._num_storable_blocks(run), run.num_exact)
            last = min(run.num_storable, num_tokens // self._block_size)
            run.num_stored = self._host.store(run.prompt.keys[first:last])

    def _answer(self, run: _Run) -> None:
        """Compute the answer: in each step a token, from the second on; the last one's KV is never needed."""
        size, num_tokens = self._block_size, run.prompt.num_prompt_tokens
        for step in self._busy_steps(run.prompt):
            if step > 1:
                self._settle()
            if (num_tokens + step - 1) % size == 0:
                self._gpu.take(1)
            num_full = (num_tokens + step) // size
            self._name(run, num_full)
            if self._host is not None and num_tokens // size < num_full <= run.num_storable:
                run.num_stored += self._host.store(run.prompt.keys[num_full - 1 : num_full])
        self._settle()

    def _busy_steps(self, prompt: PromptBlocks) -> list[int]:
        """Return the steps of an answer in which a block is begun or becomes full; nothing happens in the others."""
        size, first, last = self._block_size, prompt.num_prompt_tokens, prompt.num_tokens
        begun = range(-(-first // size) * size + 1, last + 1, size)
        full = range((first // size + 1) * size, last + 1, size)
        return sorted({num_tokens - first for num_tokens in (*begun, *full)})

    def _settle(self) -> None:
        """Take note that the copies to the host are done, as they are with the step after the prefill."""
        if self._host is not None:
            self._host.settle()

    def _name(self, run: _Run, num_full: int) -> None:
        num_full = min(num_full, run.num_exact)
        self._gpu.name(run.prompt.keys, run.num_named, num_full)
        run.num_named = max(run.num_named, num_full)

    def _num_storable_blocks(self, run: _Run) -> int:
        """Return how many of its blocks a request is worth storing below the GPU."""
        assert self._host is not None
        prompt = run.prompt
        num_blocks, num_documents = prompt.num_document_blocks, len(prompt.told.documents)
        if run.is_likely and num_documents <= (self._max_cached_documents or num_documents):
            num_blocks = len(prompt.keys)
        elif num_blocks is None:
            num_blocks = prompt.num_prompt_tokens // self._block_size
        return min(num_blocks, self._host.num_chunks)

    # Inside

    def _cut(self, request: TracedRequest, number: int | None) -> PromptBlocks:
        return cut_into_blocks(
            request,
            number,
            system_tokens=self._system_tokens,
            block_size=self._block_size,
            max_cached_documents=self._max_cached_documents,
            history=self._history(request),
        )

    def _history(self, request: TracedRequest) -> History:
        """Return what stands before a turn; one that overtook the turn before it has tokens that nobody else has."""
        if request.conversation is None or not request.history_tokens:
            return History()
        num_tokens = self._system_tokens + request.history_tokens
        known = self._histories.get(request.conversation, History())
        return known if known.num_tokens == num_tokens else History(((num_tokens, b"overtaken"),))

    def _served(self, run: _Run) -> Served:
        prompt, tiers = run.prompt, run.tiers
        by_tier = tuple(tiers.count(tier) * self._block_size for tier in Tier)
        return Served(
            tiers=tuple(
                max(tiers[document.first : document.num_needed]) if document.num_needed <= len(tiers) else None
                for document in prompt.documents
            ),
            num_cached_tokens_by_tier=(by_tier[0], by_tier[1], by_tier[2]),
            num_new_tokens=prompt.num_prompt_tokens - sum(by_tier) - run.reuse.num_tokens,
            num_loaded_tokens=by_tier[Tier.HOST] + by_tier[Tier.DISK],
            num_swapped_out_tokens=run.num_stored * self._block_size,
            reuse=run.reuse,
        )

    def _num_cached_units(self, keys: Sequence[int]) -> int:
        return self._tree.match_prefix([PathSegment(keys, len(keys) * self._block_size)]).num_units

    def _explore(self, request: TracedRequest, chosen: tuple[int, ...], num_cached: int, paths: CachedPaths) -> None:
        """Tell ``paths`` of all orders of documents that are cached further than ``num_cached`` after those chosen.

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
                paths.set(PathChange(_NO_STATIC_PREFIX, doc_ids, num_units * self._block_size))
            if is_whole:
                self._explore(request, order, num_units, paths)

    def _check_fits(self, prompt: PromptBlocks, number: int) -> None:
        num_needed = -(-prompt.num_tokens // self._block_size)
        if num_needed > self._gpu.num_usable:
            raise ConfigError(
                f"request {number} of the trace needs {num_needed:,} blocks of {self._block_size} tokens, the GPU has "
                f"{self._gpu.num_usable:,} and vLLM would refuse it: set gpu_tokens to "
                f"{(num_needed + 1) * self._block_size:,} or more"
            )

    def _num_blocks(self, name: str, num_tokens: int, least: int = 1) -> int:
        num_blocks = num_tokens // self._block_size
        if num_blocks < least and (num_tokens or least > 1):
            raise ConfigError(
                f"{name} is {num_tokens:,}; blocks hold {self._block_size} tokens, and {least} must fit: set it to "
                f"{least * self._block_size:,} or more"
            )
        return num_blocks
