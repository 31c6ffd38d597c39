"""The engines that a search makes more of: ours with the answer asked for ahead, while the search goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ragcache_core.bench.compare.peers import PEERS, Peer

SPECULATIVE: Mapping[str, Peer] = {
    f"{name}-speculative": replace(PEERS[name], name=f"{name}-speculative", summary=summary, speculates=True)
    for name, summary in (
        ("ragcache", "RAGCache, asked from what a stage of the search found, before it has ended"),
        ("ragcache-cache-aware", "the same, documents shown in the order that is cached"),
    )
}
"""Those that ``--compare`` takes beside the others with ``--search``."""
