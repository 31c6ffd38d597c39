"""The series of a store's service, for Prometheus."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ragcache_core.retrieval.storage.snapshot import StoreStats

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class ServiceMetrics:
    """One service's series, in a registry of their own."""

    media_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.num_searches = Counter(
            "ragcache_store_searches",
            "Searches by how they ended: done, cancelled (who asked left), rejected (what cannot be searched for), "
            "refused (too many ran), failed",
            ["outcome"],
            registry=registry,
        )
        for outcome in ("done", "cancelled", "rejected", "refused", "failed"):
            self.num_searches.labels(outcome)
        self.num_running = Gauge("ragcache_store_searches_running", "Searches that run now", registry=registry)
        self.first_stage_s = Histogram(
            "ragcache_store_first_stage_seconds", "Until a search's first stage", buckets=_SECONDS, registry=registry
        )
        self.search_s = Histogram(
            "ragcache_store_search_seconds", "Until a search's last stage", buckets=_SECONDS, registry=registry
        )
        self.num_failed_refreshes = Counter(
            "ragcache_store_failed_refreshes", "Changes of the store that could not be read", registry=registry
        )
        self._num_documents = Gauge("ragcache_store_documents", "Documents that the store holds", registry=registry)
        self._generation = Gauge("ragcache_store_generation", "The state that is searched", registry=registry)

    def note(self, stats: StoreStats) -> None:
        """Note what the store holds now."""
        self._num_documents.set(stats.num_documents)
        self._generation.set(stats.generation)

    def text(self) -> bytes:
        """Return the series as Prometheus reads them."""
        return generate_latest(self._registry)
