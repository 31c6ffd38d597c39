"""What commands that run for a while show meanwhile, and the file that they leave."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def counting_requests(name: str, num_requests: int) -> Iterator[Callable[[int], object]]:
    """Yield what takes how many more requests are done; a bar on a terminal."""
    from tqdm import tqdm

    with tqdm(
        total=num_requests, desc=name, unit="req", unit_scale=True, leave=False, disable=not sys.stderr.isatty()
    ) as bar:
        yield bar.update


def write_json(data: Mapping[str, object], path: Path) -> None:
    """Write a JSON file, and its folder; what was there before stays until the new one is whole."""
    text = json.dumps(data, indent=2) + "\n"
    if path.exists() and not path.is_file():  # a pipe, a terminal: nothing to be replaced
        path.write_text(text, encoding="utf-8")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
