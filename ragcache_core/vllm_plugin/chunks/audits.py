"""Audits of approximate answers: each is answered once more, exactly, while the engine is idle, and compared.

An audit is a request of the engine's own. It begins when no other request is in the engine, and is dropped when one
arrives; it begins again later, behind what the prefix cache has of it. It ends with the first token that differs.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ragcache_core.chunk.guard import ErrorGuard, GuardedAnswer
from ragcache_core.vllm_plugin.cache.forgetting import Forgotten, Freed
from ragcache_core.vllm_plugin.compat import BlockHasher, RequestStatus, repeated_request
from ragcache_core.wire import KEY, WIRE_VERSION

if TYPE_CHECKING:
    from vllm.v1.request import Request

_MAX_PENDING = 16
_MAX_STARTS = 16


@dataclass(slots=True)
class _Audit:
    answer: GuardedAnswer
    request: Request
    num_starts: int = 0


class AnswerAudits:
    """Keeps the answers that are to be audited, and tells the guard of the outcomes.

    At most 16 answers wait; further ones are not audited, nor those whose audit was dropped 16 times. Only greedy
    answers without a grammar are audited: sampled ones differ by chance, and a grammar has its own state.

    Args:
        guard: chooses each answer's alpha.
        block_hasher: names the blocks of audits as the engine names those of requests.

    Attributes:
        running: the audit that is in the engine.
    """

    def __init__(self, guard: ErrorGuard, block_hasher: BlockHasher) -> None:
        self.guard = guard
        self._block_hasher = block_hasher
        self.running: Request | None = None
        self._answers: dict[str, GuardedAnswer] = {}  # of the requests in the engine
        self._pending: deque[_Audit] = deque()
        self._audit: _Audit | None = None

    def alpha_for(self, request: Request, kind: str) -> float | None:
        """Return the alpha of a new request; None where its answer must be exact."""
        sampling = request.sampling_params
        can_audit = (
            sampling is not None
            and sampling.temperature == 0
            and not request.use_structured_output
            and not request.resumable
            and len(self._pending) < _MAX_PENDING
        )
        answer = self._answers[request.request_id] = self.guard.choose(kind, can_audit=can_audit)
        return answer.alpha

    def on_finished(self, request: Request, *, is_shown: bool, is_approximate: bool) -> None:
        """Count an answer, and keep it for an audit if it is chosen for one."""
        answer = self._answers.pop(request.request_id, None)
        if answer is None:
            return
        is_approximate = is_approximate and request.num_output_tokens > 0
        self.guard.on_answered(answer, is_shown=is_shown, is_approximate=is_approximate)
        if is_approximate and answer.is_audited and len(self._pending) < _MAX_PENDING:
            self._pending.append(_Audit(answer, request))

    @property
    def has_pending(self) -> bool:
        """Whether an answer waits for its audit."""
        return bool(self._pending)

    def begin(self) -> Request:
        """Return the request of the next audit, which is in the engine from now on."""
        self._audit = audit = self._pending.popleft()
        audit.num_starts += 1
        metadata = (audit.request.kv_transfer_params or {})[KEY]
        params: dict[str, Any] = {
            KEY: {"version": WIRE_VERSION, "documents": metadata.get("documents", []), "chunk_reuse": False}
        }
        params["max_offload_tokens"] = 0
        self.running = repeated_request(audit.request, params, self._block_hasher)
        return self.running

    def is_decided(self) -> bool:
        """Return whether the running audit needs no further token, and tell the guard of its outcome."""
        audit, found = self._audit, self.running
        if audit is None or found is None:  # its documents are deleted
            return True
        expected, num_found = audit.request.output_token_ids, found.num_output_tokens
        is_equal = list(found.output_token_ids) == list(expected[:num_found])
        is_complete = num_found == len(expected) or found.status == RequestStatus.FINISHED_STOPPED
        if is_equal and not is_complete:
            return bool(found.is_finished())
        self.guard.on_audited(audit.answer, is_equal=is_equal and num_found == len(expected))
        return True

    def end(self, *, begins_again: bool) -> None:
        """End the running audit, whose request leaves the engine; one that ``begins_again`` is the next to begin."""
        if begins_again and self._audit is not None and self._audit.num_starts < _MAX_STARTS:
            self._pending.appendleft(self._audit)
        self.running = self._audit = None

    def clear(self) -> None:
        """Audit none of the answers that there are or are being computed, and learn nothing from the running audit."""
        self._pending.clear()
        self._audit = None
        for request_id, answer in self._answers.items():
            self._answers[request_id] = replace(answer, is_audited=False)

    def forget_weights(self) -> None:
        """Start again for another model, to which the answers that are being computed do not count."""
        self.clear()
        self._answers.clear()
        self.guard.forget()

    # A holder of what may be forgotten: prompts with the documents

    def forget(self, forgotten: Forgotten) -> Freed:
        """Drop the answers that wait or come, whatever they show; KV that has only expired is no secret."""
        if forgotten.doc_ids or forgotten.is_all:
            self.clear()
        return Freed()

    def num_pending(self) -> int:
        """Return 0: no KV is held."""
        return 0

    def deletion_problem(self) -> str | None:
        """Return None: no KV is held."""
        return None
