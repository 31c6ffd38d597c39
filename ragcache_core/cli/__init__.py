"""The command line: ``ragcache index | ask | store | serve | stats | profile``, a file each.

Exit status: 0 done, 1 an error of ours, 2 a command that cannot be understood, 130 interrupted, 143 terminated.
"""

from ragcache_core.cli.app import cli, main

__all__ = ["cli", "main"]
