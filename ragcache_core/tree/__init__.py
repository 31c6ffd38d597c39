"""The knowledge tree: one prefix tree over documents for all tiers, free of vLLM and of I/O."""

from ragcache_core.tree.admission import Admission, admit, admit_within_quotas
from ragcache_core.tree.changes import NodeChanges
from ragcache_core.tree.invariants import check_invariants
from ragcache_core.tree.knowledge_tree import KnowledgeTree
from ragcache_core.tree.node import EvictedUnit, Location, PathSegment, PrefixMatch, TreeNode, masks_of, runs_of
from ragcache_core.tree.retention import Retention
from ragcache_core.tree.tiered_tree import NO_OWNER

__all__ = [
    "NO_OWNER",
    "Admission",
    "EvictedUnit",
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
    "masks_of",
    "runs_of",
]
