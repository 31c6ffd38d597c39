"""The knowledge tree: one prefix tree over documents for all tiers, free of vLLM and of I/O."""

from ragcache_core.tree.admission import Admission, admit, admit_within_quotas
from ragcache_core.tree.changes import NodeChanges
from ragcache_core.tree.invariants import check_invariants
from ragcache_core.tree.knowledge_tree import KnowledgeTree
from ragcache_core.tree.node import EvictedRun, Location, PathSegment, PrefixMatch, TreeNode, length_of_run, runs_of
from ragcache_core.tree.retention import Retention
from ragcache_core.tree.tiered_tree import NO_OWNER, total_size

__all__ = [
    "NO_OWNER",
    "Admission",
    "EvictedRun",
    "KnowledgeTree",
    "Location",
    "NodeChanges",
    "PathSegment",
    "PrefixMatch",
    "Retention",
    "TreeNode",
    "admit",
    "admit_within_quotas",
    "check_invariants",
    "length_of_run",
    "runs_of",
    "total_size",
]
