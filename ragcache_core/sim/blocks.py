"""A cache of blocks over tiers: what vLLM does with RAGCache's plugin, request by request or step by step."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from ragcache_core.errors import ConfigError
from ragcache_core.ordering import CachedPaths, PathChange, arrange
from ragcache_core.policy import PrefillCost, make_policy
from ragcache_core.sim.block_tiers import DiskChunks, GPUBlocks, HeldBlocks, HostChunks
from ragcache_core.sim.cache import NO_REUSE, Reuse, Served, SimulatedCache
from ragcache_core.sim.chunks import StoredChunks
from ragcache_core.sim.options import INFINITE, SimulationOptions
from ragcache_core.sim.prompt_blocks import History, PromptBlocks, cut_into_blocks
from ragcache_core.sim.stepping.vllm_host import VLLMHostChunks
from ragcache_core.sim.traces.trace import TracedRequest
from ragcache_core.tree import KnowledgeTree, PathSegment
from ragcache_core.types import Tier

_NO_STATIC_PREFIX = b""
_UNBOUNDED_TOKENS = 1 << 40


@dataclass(slots=True, eq=False)
class Run:
    """A request on its way through the engine.

    Attributes:
        tiers: where the blocks lay that it hit.
        num_computed: of its prompt's tokens are on the GPU, or on their way there.
        num_answered: tokens of its answer whose KV is on the GPU.
        num_again: tokens of its answer that were on the GPU when it was preempted.
        num_named: of its blocks are full, and can be found by others.
        stored: of its blocks, those that were copied to the host. ``found``: those that were there.
        num_storable: of its blocks, those of its answer included, are worth that.
        turn: of its conversation, and whether that is likely to go on.
        reuse: what it takes from chunks.
        num_exact: of its blocks may be found by others, once they are full.
        held: its blocks on the GPU. ``promised``: what is kept for it below, until it is loaded.
    """

    prompt: PromptBlocks
    request: TracedRequest
    number: int
    num_protected: int = 0
    tiers: list[Tier] = field(default_factory=list)
    num_computed: int = 0
    num_answered: int = 0
    num_again: int = 0
    num_named: int = 0
    stored: list[Hashable] = field(default_factory=list)
    found: list[Hashable] = field(default_factory=list)
    num_storable: int = 0
    turn: int = 1
    is_likely: bool = False
    reuse: Reuse = NO_REUSE
    num_exact: int = sys.maxsize
    held: HeldBlocks = field(default_factory=HeldBlocks)
    promised: Sequence[Hashable] = ()

    @property
    def num_left(self) -> int:
        """Tokens of the prompt that must be computed still."""
        return self.prompt.num_prompt_tokens - self.num_computed


class BlockCache(SimulatedCache):
    """Keeps and gives up blocks of KV as RAGCache's engine does (vLLM 0.32 and ``vllm_plugin``).

    For a request, in this order:

    1. its path is put into the tree, and protected where that would be half of the GPU at most (:meth:`enter`);
    2. it hits what the GPU has from the first block on, but for its last token's block, and then what host and disk
       have. It gets its blocks: spare ones, then what the tree gives up. What was hit below the GPU is copied into
       some of them (:meth:`begin`, :meth:`load`);
    3. its access is counted. What it computes enters the GPU tier as soon as it has blocks for it. Its prompt is copied
       to the host, and from there to the disk, where it is not there already: up to the end of the documents, if there
       are any, and as far as the host holds it (:meth:`compute`);
    4. blocks of its answer are allocated one by one, and become full and known (:meth:`answer`);
    5. it lets its blocks go, the last ones first (:meth:`end`).

    :meth:`serve` does all of it at once: a prompt is computed in one step, transfers are done when the next request
    comes, and a running request ends before the next one is served. :class:`~ragcache_core.sim.stepping.StepEngine`
    has several requests on their way. The system prompt is part of the path, and one block of the GPU is vLLM's null
    block. Without ``knows_documents`` it is vLLM without the plugin: whole prompts and answers are copied to the host.
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
        self.block_size = options.block_size
        self._system_tokens = options.system_tokens
        self._max_cached_documents = options.max_cached_documents
        self._cost = cost
        self._chunks = chunks
        gpu_tokens = _UNBOUNDED_TOKENS if is_infinite else options.gpu_tokens
        num_gpu = self._num_blocks("gpu_tokens", gpu_tokens, least=2)
        num_host = self._num_blocks("host_tokens", 0 if is_infinite else options.host_tokens)
        num_disk = self._num_blocks("disk_tokens", 0 if is_infinite else options.disk_tokens)
        self._tree = KnowledgeTree(
            make_policy("lru" if is_infinite or not options.knows_documents else options.policy, cost),
            ghost_size=options.ghost_size,
            keeps_frequency=options.keeps_frequency,
            shadow_tokens=(num_host or num_gpu) * self.block_size,
        )
        self._gpu = GPUBlocks(self._tree, num_gpu, self.block_size)
        disk = DiskChunks(self._tree, num_disk) if num_disk else None
        self._host: HostChunks | VLLMHostChunks | None = None
        if num_host and (options.knows_documents or disk is not None):
            self._host = HostChunks(self._tree, num_host, disk)
        elif num_host:
            self._host = VLLMHostChunks(num_host, is_arc=options.policy == "arc")
        self._num_protectable = num_gpu // 2
        self._knows_documents = options.knows_documents
        self._histories: dict[int, History] = {}
        self._begun: list[Run] = []

    @property
    def tree(self) -> KnowledgeTree:
        """The tree, to look at."""
        return self._tree

    # The door

    def num_cached_tokens(self, request: TracedRequest) -> int:
        prompt = self._cut(request, None)
        num_units = self._num_cached_units(prompt.keys)
        return min(num_units, max(prompt.num_prompt_tokens - 1, 0) // self.block_size) * self.block_size

    def best_order(self, request: TracedRequest) -> tuple[int, ...]:
        paths = CachedPaths()
        self._explore(request, (), 0, paths)
        return arrange(request.doc_ids, "cache_aware", paths, prefix=_NO_STATIC_PREFIX)

    def serve(self, request: TracedRequest, number: int) -> Served:
        """Serve a request; see the base class.

        Raises:
            ConfigError: the GPU has not enough blocks for it, as vLLM would refuse it.
        """
        run = self.enter(request, number)
        if not self.begin(run):
            raise AssertionError("no other request runs, and it was checked that this one fits")
        self.load(run)
        self.compute(run, run.num_left)
        for step in self._busy_steps(run.prompt):
            if step > 1:
                self.settle()
            run.num_answered = step - 1
            self.answer(run)
        self.settle()
        served = self.served(run)
        self.end(run)
        return served

    # A request's way

    def enter(self, request: TracedRequest, number: int) -> Run:
        """Return a request that waits: what it will hit is given up last.

        Raises:
            ConfigError: the GPU has not enough blocks for it, as vLLM would refuse it.
        """
        prompt = self._cut(request, number)
        self._check_fits(prompt, number)
        self._tree.insert(prompt.path)
        run = Run(prompt, request, number)
        if prompt.path:
            self._tree.retain(prompt.path[-1].keys[-1])
        keys = prompt.keys[: prompt.num_prompt_tokens // self.block_size]
        if keys and self._knows_documents:
            self._protect(run, keys)
        return run

    def begin(self, run: Run, max_tokens: int = sys.maxsize) -> bool:
        """Give a request its blocks, those of ``max_tokens`` to compute at most; return False where it must wait.

        It waits until its whole prompt finds free blocks beside what those that have begun will take for theirs. Who
        begins it lets it :meth:`load`, and then :meth:`compute` what is left.
        """
        prompt, size = run.prompt, self.block_size
        num_tokens = prompt.num_prompt_tokens
        keys = prompt.keys[: num_tokens // size]
        num_local = self._gpu.num_leading(keys[: (num_tokens - 1) // size])
        num_free = self._gpu.num_free - sum(map(self._num_missing, self._begun))
        if self._num_missing(run) - self._gpu.num_in_use(keys[:num_local]) > num_free:
            return False
        below = [] if self._host is None else self._host.look_up(keys[num_local:])
        run.promised = keys[num_local : num_local + len(below)]
        run.tiers, run.num_named = [Tier.GPU] * num_local + below, num_local
        run.is_likely = self._tree.returning.is_likely(self._tree.conversations.turn_of(keys))
        run.turn = self._tree.conversations.on_access(keys, self._tree.num_requests)
        self._reuse(run, run.request, run.number)
        run.held = self._gpu.use(keys[:num_local])
        run.num_computed = min(len(run.tiers) * size, num_tokens - 1)  # of what was loaded whole the last one again
        run.num_answered = 0
        if below:  # they are loaded first, and the rest of the prompt gets its blocks afterwards
            self._gpu.take(run.held, len(below))
        else:
            self._fill(run, min(num_tokens, run.num_computed + max_tokens))
        self._begun.append(run)
        self._unprotect(run)
        self._count_access(run)
        return True

    def load(self, run: Run) -> None:
        """Note that what a request hit below the GPU is there now."""
        if run.promised:
            assert self._host is not None
            self._host.let_go(run.promised)
            run.found += run.promised
            run.promised = ()
            self._name(run, len(run.tiers))

    def num_missing_blocks(self, run: Run, num_tokens: int) -> int:
        """Return how many free blocks are missing to compute so many more tokens, of the prompt or the answer."""
        num_needed = -(-(run.num_computed + run.num_answered + num_tokens) // self.block_size)
        return num_needed - run.held.num_blocks - self._gpu.num_free

    def compute(self, run: Run, num_tokens: int) -> None:
        """Compute so many tokens of the prompt, and copy it to the host when it is whole."""
        num_prompt_tokens = run.prompt.num_prompt_tokens
        run.num_computed += num_tokens
        self._fill(run, run.num_computed)
        if run.num_computed == num_prompt_tokens and self._host is not None:
            is_loaded = len(run.tiers) > run.tiers.count(Tier.GPU)
            first = len(run.tiers) if is_loaded else 0  # vLLM passes over all that was hit, on the GPU too
            run.num_storable = min(self._num_storable_blocks(run), run.num_exact)
            last = min(run.num_storable, num_prompt_tokens // self.block_size)
            self._store(run, run.prompt.keys[first:last])

    def answer(self, run: Run) -> None:
        """Compute a token of the answer: the one that the step before gave; the last one's KV is never needed."""
        size, num_tokens = self.block_size, run.prompt.num_prompt_tokens
        run.num_answered += 1
        if (num_tokens + run.num_answered - 1) % size == 0:
            self._gpu.take(run.held, 1)
        num_full = (num_tokens + run.num_answered) // size
        self._name(run, num_full)
        if self._host is not None and num_tokens // size < num_full <= run.num_storable:
            self._store(run, run.prompt.keys[num_full - 1 : num_full])

    def _store(self, run: Run, keys: Sequence[int]) -> None:
        assert self._host is not None
        stored = self._host.store(keys)
        run.stored += stored
        run.found += set(keys).difference(stored)

    def settle(self) -> None:
        """Take note that the copies to the host are done, as they are with the step after they were begun."""
        if self._host is not None:
            self._host.settle()

    def end(self, run: Run) -> None:
        """Note that a request was answered."""
        prompt = run.prompt
        if prompt.answer_key is not None:
            self._tree.conversations.on_answered(prompt.answer_key, run.turn, self._tree.num_requests)
        if prompt.path:
            self._tree.release(prompt.path[-1].keys[-1])
        self._free(run)
        if self._host is not None:
            self._host.on_answered(prompt.keys, set(run.stored), set(run.found))
        if run.request.conversation is not None:
            self._histories[run.request.conversation] = prompt.told

    def preempt(self, run: Run) -> None:
        """Take a request's blocks away; it waits again, and hits what is left of them when it begins anew."""
        self._free(run)
        run.num_again = max(run.num_again, run.num_answered)

    def _free(self, run: Run) -> None:
        self._gpu.free(run.held)
        self._begun.remove(run)
        run.held = HeldBlocks()

    def _num_missing(self, run: Run) -> int:
        """Return how many blocks a request does not have yet for its prompt, and what it had answered before."""
        num_tokens = run.prompt.num_prompt_tokens + run.num_again
        return max(-(-num_tokens // self.block_size) - run.held.num_blocks, 0)

    def _protect(self, run: Run, keys: Sequence[int]) -> None:
        if len(keys) <= self._num_protectable:
            self._tree.protect(keys[-1])
            run.num_protected = len(keys)
            self._num_protectable -= len(keys)

    def _unprotect(self, run: Run) -> None:
        if run.num_protected:
            self._tree.unprotect(run.prompt.keys[run.num_protected - 1])
            self._num_protectable += run.num_protected
            run.num_protected = 0

    def _fill(self, run: Run, num_tokens: int) -> None:
        """Give a request blocks for so many tokens of its prompt, as many as are full with their content."""
        self._gpu.take(run.held, max(-(-num_tokens // self.block_size) - run.held.num_blocks, 0))
        self._name(run, num_tokens // self.block_size)

    def _reuse(self, run: Run, request: TracedRequest, number: int) -> None:
        """Take what chunks have; blocks from the first approximate token on are keyed for no other request."""
        if self._chunks is not None:
            run.reuse = self._chunks.serve(request, number, len(run.tiers) * self.block_size)
        if run.reuse.first_token is not None:
            run.num_exact = run.reuse.first_token // self.block_size

    def _count_access(self, run: Run) -> None:
        num_cached = len(run.tiers) * self.block_size + run.reuse.num_tokens
        num_missed = run.prompt.num_prompt_tokens - num_cached
        self._tree.record_access(
            self._tree.insert(run.prompt.path),
            num_hit_units=len(run.tiers),
            cost_per_token_s=self._tree.policy.cost_per_token_s(self._cost, num_cached, num_missed),
            turn=run.turn,
        )

    def _busy_steps(self, prompt: PromptBlocks) -> list[int]:
        """Return the steps of an answer in which a block is begun or becomes full; nothing happens in the others."""
        size, first, last = self.block_size, prompt.num_prompt_tokens, prompt.num_tokens
        begun = range(-(-first // size) * size + 1, last + 1, size)
        full = range((first // size + 1) * size, last + 1, size)
        return sorted({num_tokens - first for num_tokens in (*begun, *full)})

    def _name(self, run: Run, num_full: int) -> None:
        num_full = min(num_full, run.num_exact)
        self._gpu.name(run.held, run.prompt.keys, run.num_named, num_full)
        run.num_named = max(run.num_named, num_full)

    def _num_storable_blocks(self, run: Run) -> int:
        """Return how many of its blocks a request is worth storing below the GPU."""
        assert self._host is not None
        prompt = run.prompt
        if not self._knows_documents:
            return min(len(prompt.keys), self._host.num_chunks)
        num_blocks, num_documents = prompt.num_document_blocks, len(prompt.told.documents)
        if run.is_likely and num_documents <= (self._max_cached_documents or num_documents):
            num_blocks = len(prompt.keys)
        elif num_blocks is None:
            num_blocks = prompt.num_prompt_tokens // self.block_size
        return min(num_blocks, self._host.num_chunks)

    # Inside

    def _cut(self, request: TracedRequest, number: int | None) -> PromptBlocks:
        return cut_into_blocks(
            request,
            number,
            system_tokens=self._system_tokens,
            block_size=self.block_size,
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

    def served(self, run: Run) -> Served:
        """Return what a request found when it began."""
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
                paths.set(PathChange(_NO_STATIC_PREFIX, doc_ids, num_units * self.block_size))
            if is_whole:
                self._explore(request, order, num_units, paths)

    def _check_fits(self, prompt: PromptBlocks, number: int) -> None:
        num_needed = -(-prompt.num_tokens // self.block_size)
        if num_needed > self._gpu.num_usable:
            raise ConfigError(
                f"request {number} of the trace needs {num_needed:,} blocks of {self.block_size} tokens, the GPU has "
                f"{self._gpu.num_usable:,} and vLLM would refuse it: set gpu_tokens to "
                f"{(num_needed + 1) * self.block_size:,} or more"
            )

    def _num_blocks(self, name: str, num_tokens: int, least: int = 1) -> int:
        num_blocks = num_tokens // self.block_size
        if num_blocks < least and (num_tokens or least > 1):
            raise ConfigError(
                f"{name} is {num_tokens:,}; blocks hold {self.block_size} tokens, and {least} must fit: set it to "
                f"{least * self.block_size:,} or more"
            )
        return num_blocks
