"""An OpenTelemetry SDK for one test, and its spans as a tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from opentelemetry.sdk.trace import ReadableSpan, Tracer, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.support.waiting import until


@dataclass
class Traced:
    """What was recorded; spans that are still open are not there."""

    exporter: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)
    provider: TracerProvider = field(default_factory=TracerProvider)

    def __post_init__(self) -> None:
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    @property
    def tracer(self) -> Tracer:
        """The application's own."""
        made = self.provider.get_tracer("application")
        assert isinstance(made, Tracer)
        return made

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        return self.exporter.get_finished_spans()

    def named(self, name: str) -> list[ReadableSpan]:
        return sorted((span for span in self.spans if span.name == name), key=lambda span: span.start_time or 0)

    def await_spans(self, name: str, number: int) -> list[ReadableSpan]:
        """Return the spans of this name once there are that many: a server's thread may be late."""
        assert until(lambda: len(self.named(name)) >= number), f"{len(self.named(name))} of {number} spans {name}"
        return self.named(name)

    def tree(self, parent: ReadableSpan | None = None) -> dict[str, object]:
        """Return names below a span, or below none, each with those below it; equal ones once."""
        above = None if parent is None else parent.context.span_id
        below = [span for span in self.spans if (span.parent.span_id if span.parent else None) == above]
        return {span.name: self.tree(span) for span in sorted(below, key=lambda span: span.start_time or 0)}

    def texts(self) -> str:
        """Return all that was recorded."""
        return "".join(span.to_json() for span in self.spans)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traced]:
    """The application has set up an SDK."""
    recorded = Traced()
    monkeypatch.setattr("opentelemetry.trace.get_tracer_provider", lambda: recorded.provider)
    yield recorded
    recorded.provider.shutdown()
