"""The command line ``ragcache``, with one module per command.

Exit status: 0 done, 1 an error of ours, 2 a command that cannot be understood, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn

from ragcache_core._lazy import exported_lazily

if TYPE_CHECKING:
    from ragcache_core.cli.app import cli
else:
    __getattr__, __dir__ = exported_lazily(globals(), {"ragcache_core.cli.app": ("cli",)})

__all__ = ["cli", "main"]


def main() -> NoReturn:
    """Run the command line and exit: the ``ragcache`` entry point."""
    try:
        from ragcache_core.cli.app import main as run
    except KeyboardInterrupt:  # importing takes a tenth of a second
        sys.stderr.write("ragcache: interrupted\n")
        sys.exit(130)
    run()
