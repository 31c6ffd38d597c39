"""Counts the unanswered requests of a replica of a fleet, as its client knows them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ragcache_core.ordering import MAX_PATH_DOCUMENTS, CachedPaths, DocPath, PathChange
from ragcache_core.types import DocId


@dataclass(frozen=True, slots=True)
class PromptInfo:
    """The routing fields of a request.

    Attributes:
        documents: in the order in which the prompt shows them.
        ends: tokens of the prompt up to the end of each document; none where they are not known.
        num_static_tokens: before the first document.
        num_tokens: of the whole prompt, about as many.
        prefix: :func:`~ragcache_core.ordering.static_prefix_digest`; None where it is not known.
        key: what is hashed: the first document, else how the prompt begins.
        text_digest: names the text before the documents, where ``prefix`` is not known and ``ends`` are estimated.
    """

    documents: tuple[DocId, ...]
    ends: tuple[int, ...]
    num_static_tokens: int
    num_tokens: int
    prefix: bytes | None
    key: str
    text_digest: bytes | None = None


@dataclass(eq=False, slots=True)
class ReplicaLoad:
    """Counts one client's unanswered requests to one replica. Not thread-safe.

    Attributes:
        num_running: requests that are not over.
        num_waiting_tokens: to be computed before those have their first tokens that have none.
        expected: what will be cached once they are answered.
    """

    num_running: int = 0
    num_waiting_tokens: int = 0
    expected: CachedPaths = field(default_factory=CachedPaths)
    _uses: Counter[tuple[bytes, DocPath]] = field(default_factory=Counter)

    def begin(self, prompt: PromptInfo, num_cached_tokens: int) -> InFlightRequest:
        """Count a request; ``num_cached_tokens`` of its documents are cached or expected."""
        self.num_running += 1
        sent = InFlightRequest(self, prompt, max(prompt.num_tokens - prompt.num_static_tokens - num_cached_tokens, 0))
        self.num_waiting_tokens += sent.num_waiting_tokens
        for path, num_tokens in _paths(prompt):
            self._uses[path] += 1
            self.expected.set(PathChange(*path, num_tokens))
        return sent

    def end(self, prompt: PromptInfo) -> None:
        """Count a request as finished."""
        self.num_running -= 1
        for path, _ in _paths(prompt):
            self._uses[path] -= 1
            if not self._uses[path]:
                del self._uses[path]
                self.expected.set(PathChange(*path, 0))


@dataclass(eq=False, slots=True)
class InFlightRequest:
    """An open request of a replica."""

    load: ReplicaLoad
    prompt: PromptInfo
    num_waiting_tokens: int

    def answered(self) -> None:
        """Count its prefill as done, at its first token. Idempotent."""
        self.load.num_waiting_tokens -= self.num_waiting_tokens
        self.num_waiting_tokens = 0

    def end(self) -> None:
        """Count it as finished, answered or not. Call once."""
        self.answered()
        self.load.end(self.prompt)


def _paths(prompt: PromptInfo) -> list[tuple[tuple[bytes, DocPath], int]]:
    """Return the prefixes that a prompt leaves in a cache, and the tokens up to their ends."""
    prefix = prompt.prefix or prompt.text_digest
    if prefix is None or not prompt.ends:
        return []
    ends = prompt.ends[:MAX_PATH_DOCUMENTS]
    paths = [((prefix, prompt.documents[: n + 1]), end) for n, end in enumerate(ends)]
    return [((prefix, ()), prompt.num_static_tokens), *paths]
