"""The tree and the policies as machine code: what `make test-compiled` runs is that, and the checkout stays Python."""

from __future__ import annotations

import os

from ragcache_core.tree import is_compiled


def test_the_tree_is_compiled_where_that_was_asked_for_and_nowhere_else() -> None:
    asked_for = os.environ.get("RAGCACHE_COMPILE") == "1"
    assert is_compiled() == asked_for, "machine code in the checkout hides what is edited: remove its *.so"
