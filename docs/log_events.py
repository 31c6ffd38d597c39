"""Write docs/reference/log-events.md from the event codes of the log: ``python docs/log_events.py``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ragcache_core.log import LOG_EVENTS, ROOT

PAGE = Path(__file__).parent / "reference" / "log-events.md"


def page() -> str:
    """Return the page."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Log events"
    yield ""
    yield "This page is written by `python docs/log_events.py` from the declarations in `ragcache_core/log.py`."
    yield ""
    yield "Each warning and error begins with an event code, as in `RC-TIER-OFF: RAGCache's disk tier is out of"
    yield "service`. With `--log-format json` the code is the field `event`. Codes stay the same, messages may change."
    yield ""
    yield f"All loggers are below `{ROOT}`, as `{ROOT}.core.chunkstore`. In an application they go where its own"
    yield "configuration of `logging` sends them. In an engine they go where vLLM's log goes, at its level."
    yield "Events with a `*` may come with every request or read. They are logged at most once a minute in a process."
    yield ""
    yield "By symptom, and a runbook for each alert: [troubleshooting](../operate/troubleshooting.md)."
    for group, events in LOG_EVENTS.items():
        yield from ("", f"## {group}", "", "| code | level | meaning | action |", "|---|---|---|---|")
        for code, event in sorted(events.items()):
            star = "&nbsp;*" if event.is_limited else ""
            yield f"| `{code}`{star} | {event.level.lower()} | {event.meaning} | {event.action} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
