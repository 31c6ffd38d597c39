"""How long searches took: read from what measured them."""

from __future__ import annotations

import json
import math
from pathlib import Path

from ragcache_core.errors import ConfigError


def read_searches(path: Path) -> tuple[float, ...]:
    """Return the seconds of the searches in a file: of ``ragcache bench --search --output``, or a list ``search_s``.

    Raises:
        ConfigError: it cannot be read, or has no searches, or other things than seconds.
    """
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"search {path} cannot be read ({error.strerror}): name measured searches") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"search {path} is not JSON ({error}): name a file of measured searches") from error
    found = data.get("search_s") if isinstance(data, dict) else None
    if isinstance(data, dict) and isinstance(runs := data.get("runs"), list):
        searched = [run["search"] for run in runs if isinstance(run, dict) and run.get("search")]
        found = [seconds for search in searched for seconds in search.get("search_s", ())]
    if not isinstance(found, list) or not found:
        raise ConfigError(
            f"search {path} has no searches: name the results of 'ragcache bench --search', or a file with search_s"
        )
    for seconds in found:
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
            raise ConfigError(f"search {path} has {seconds!r:.40} among its seconds; each must be 0 or more")
    return tuple(map(float, found))
