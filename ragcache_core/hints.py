"""What a request may say of the KV that it leaves: how long it is kept, what it waits for, and what is read ahead.

The hints are names of the ``ragcache`` metadata beside the documents (see ``wire.py``). vLLM's ``kv_hints`` envelope
carries the same as actions::

    KvHintsEnvelope(..., actions=[KvHintAction(action_type="ragcache.retain", payload={"retain_s": 30.0}, ...)])
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from ragcache_core.errors import ConfigError, quoted
from ragcache_core.types import DocId

MAX_PRIORITY: Final = 9
MAX_HINT_S: Final = 86_400.0
MAX_PREFETCHED: Final = 64
MAX_ID_CHARS: Final = 1024
MAX_TOOL_CHARS: Final = 64


@dataclass(frozen=True, slots=True)
class CacheHints:
    """What one request says of the KV that it leaves. No hint changes an answer.

    Attributes:
        priority: 0 to 9. Above 0 prompt and answer are retained, for ``retain_s`` or else as long as the engine allows.
            Where the share for retained KV is full, KV of a lower priority gives way.
        retain_s: seconds from the answer's end, up to 86,400, for which prompt and answer are evicted last. It ends
            before with the next request whose prompt goes on from the answer.
        ttl_s: seconds from the answer's end, up to 86,400, after which blocks that no other request has used are
            evicted first.
        demote: these blocks are evicted first from the answer's end on, and not stored below the GPU.
        prefetch: up to 64 ids of documents that next requests will show: what is on disk of their prefixes is read into
            host memory.
        tool: name of the tool that runs between the answer and the next request of this conversation. How long it
            usually takes is learned, and decides when prompt and answer are evicted.

    Raises:
        ConfigError: a field has a value that cannot work, or two contradict each other.
    """

    priority: int = 0
    retain_s: float | None = None
    ttl_s: float | None = None
    demote: bool = False
    prefetch: Sequence[DocId] = ()
    tool: str | None = None

    def __post_init__(self) -> None:
        for name, (is_possible, what) in _POSSIBLE.items():
            value = getattr(self, name)
            if not is_possible(value):
                raise ConfigError(f"{name} is {quoted(value)}: send {what}, or leave it out")
        if self.demote and self.ttl_s:
            raise ConfigError(f"demote is true beside ttl_s {self.ttl_s:g}: demote is a ttl_s of 0, send one of them")
        kept_s = math.inf if self.retain_s is None and self.priority else self.retain_s or 0.0
        if self.end_s is not None and kept_s > self.end_s:
            end = "demote is true" if self.demote else f"ttl_s is {self.ttl_s:g}"
            kept = f"retain_s {self.retain_s:g}" if self.retain_s is not None else f"priority {self.priority}"
            raise ConfigError(f"{end} beside {kept}, which keeps KV for longer: leave one of them out")

    @property
    def end_s(self) -> float | None:
        """Seconds after which the blocks are evicted first; None: never."""
        return 0.0 if self.demote else self.ttl_s

    @property
    def is_retained(self) -> bool:
        """Whether prompt and answer are to be kept."""
        return self.priority > 0 or bool(self.retain_s)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that are set, as they are sent."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value is not None and value != getattr(NO_HINTS, name)}


def _is_seconds(value: object) -> bool:
    return value is None or (
        isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_HINT_S
    )


def _is_priority(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_PRIORITY


def _is_tool(value: object) -> bool:
    """Return whether a value can be the name of a tool."""
    return value is None or (isinstance(value, str) and 0 < len(value) <= MAX_TOOL_CHARS)


def _are_ids(value: object) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) <= MAX_PREFETCHED
        and all(isinstance(each, str) and 0 < len(each) <= MAX_ID_CHARS for each in value)
    )


_SECONDS: Final = f"seconds from 0 to {MAX_HINT_S:,.0f}"
_POSSIBLE: Final = {
    "priority": (_is_priority, f"a whole number from 0 to {MAX_PRIORITY}"),
    "retain_s": (_is_seconds, _SECONDS),
    "ttl_s": (_is_seconds, _SECONDS),
    "demote": (lambda value: isinstance(value, bool), "true or false"),
    "prefetch": (_are_ids, f"a list of at most {MAX_PREFETCHED} ids of documents, of 1 to {MAX_ID_CHARS:,} characters"),
    "tool": (_is_tool, f"a name of 1 to {MAX_TOOL_CHARS} characters"),
}
HINTS: Final = tuple(_POSSIBLE)
NO_HINTS: Final = CacheHints()


def read_hints(settings: Mapping[str, Any]) -> CacheHints:
    """Return the hints among the names of a request's metadata or options; None counts as unset.

    Raises:
        ConfigError: one is not possible.
    """
    given = {name: settings[name] for name in HINTS if settings.get(name) is not None}
    return CacheHints(**given) if given else NO_HINTS


# vLLM's kv_hints: actions with a type and a payload, whose fields are ours

Actions = Iterable[tuple[str, Mapping[str, Any]]]
"""Type and payload of each action."""
_ACTIONS: Final = {
    "ragcache.retain": ("retain_s", "priority"),
    "ragcache.demote": ("demote", "ttl_s"),
    "ragcache.prefetch": ("prefetch",),
    "ragcache.tool": ("tool",),
}


def hints_of_actions(actions: Actions) -> tuple[dict[str, Any], int]:
    """Return the hints of a ``kv_hints`` envelope's actions, not validated, and the number of unknown actions."""
    hints: dict[str, Any] = {}
    num_unknown = 0
    for action_type, payload in actions:
        if action_type not in _ACTIONS:
            num_unknown += 1
            continue
        known = {name: value for name, value in payload.items() if name in _ACTIONS[action_type]}
        num_unknown += len(known) < len(payload)
        hints |= known or ({"demote": True} if action_type == "ragcache.demote" else {})
    return hints, num_unknown


def actions_of_hints(hints: CacheHints) -> list[tuple[str, dict[str, Any]]]:
    """Return type and payload of the actions that say the same in a ``kv_hints`` envelope."""
    given = hints.to_dict()
    actions = [(kind, {n: given[n] for n in names if n in given}) for kind, names in _ACTIONS.items()]
    return [(kind, payload) for kind, payload in actions if payload]
