"""``python -m ragcache_core`` is ``ragcache``."""

from ragcache_core.cli import main

if __name__ == "__main__":
    main()
