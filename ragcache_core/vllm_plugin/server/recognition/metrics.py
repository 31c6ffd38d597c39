"""Recognition metrics on ``/metrics``: each API server counts its prompts, and Prometheus' client adds them."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

from ragcache_core.vllm_plugin.server.recognition.service import RecognitionService

_COUNTERS = {
    "num_prompts": ("ragcache_plain_prompts", "Prompts of clients that do not name their documents."),
    "num_recognised": ("ragcache_recognised_documents", "Registered documents recognised in such prompts."),
    "num_ambiguous": ("ragcache_ambiguous_documents", "Recognised documents whose text several ids have."),
    "num_unregistered": ("ragcache_unregistered_prompts", "Such prompts without a registered document."),
    "num_private": ("ragcache_private_prompts", "Such prompts that share no KV, as they may show restricted text."),
}
_shown: list[RecognitionMetrics] = []


class RecognitionMetrics:
    """Metrics of one process, in which Prometheus' client allows each name once."""

    def __init__(self) -> None:
        self._counters = {key: Counter(name, text) for key, (name, text) in _COUNTERS.items()}
        self._documents = Gauge(
            "ragcache_registered_documents", "Registered documents of all tenants.", multiprocess_mode="mostrecent"
        )
        self._before: dict[str, int] = {}

    def show(self, service: RecognitionService) -> None:
        """Add a service's counts since the last call."""
        for key, counter in self._counters.items():
            now = getattr(service.counts, key)
            counter.inc(now - self._before.get(key, 0))
            self._before[key] = now
        self._documents.set(service.figures()["num_documents"])


def show_metrics(service: RecognitionService) -> None:
    """Export a service's statistics on ``/metrics`` of this process."""
    if not _shown:
        _shown.append(RecognitionMetrics())
    service.on_counted = lambda: _shown[0].show(service)
    _shown[0].show(service)
