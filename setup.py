"""Compiles the tree and the policies with mypyc; everything else about the package is in pyproject.toml.

``RAGCACHE_COMPILE=1`` insists on machine code, ``0`` on Python. Without it, a wheel is compiled where that works,
and an editable installation is not: compiled modules would hide what is edited.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

_NOT_COMPILED = {
    "__init__.py",
    "invariants.py",  # for tests
    "prefill_cost.py",  # checks types itself, with a message for people
}
_BUILT_IN = "build/mypyc"
_MYPY_OPTIONS = [
    "--config-file=",
    "--ignore-missing-imports",
    "--follow-imports=silent",
    f"--cache-dir={_BUILT_IN}/cache",
]
"""What is built in isolation sees no dependencies; `make lint` checks the types with them."""

_wish = os.environ.get("RAGCACHE_COMPILE", "")
_is_asked_for = _wish == "1"
_commands = {"bdist_wheel", "build_ext", *(["editable_wheel"] if _is_asked_for else [])}


class BuildExtensions(build_ext):
    """Leaves the modules as Python where no C compiler works."""

    def run(self) -> None:
        try:
            super().run()
        except Exception as error:
            if _is_asked_for:
                raise
            for extension in self.extensions:
                Path(self.get_ext_fullpath(extension.name)).unlink(missing_ok=True)
            self.extensions = []
            self.warn(f"the tree and the policies stay Python, about half as fast: {error}")


def _compiled_modules() -> list[Extension]:
    if _wish == "0" or _commands.isdisjoint(sys.argv):
        return []
    rooms = [Path("ragcache_core/policy"), Path("ragcache_core/tree")]
    files = [str(file) for room in rooms for file in sorted(room.glob("*.py")) if file.name not in _NOT_COMPILED]
    try:
        from mypyc.build import mypycify

        Path(_BUILT_IN).mkdir(parents=True, exist_ok=True)
        extensions: list[Extension] = mypycify([*_MYPY_OPTIONS, *files], target_dir=_BUILT_IN, group_name="ragcache")
    except (ImportError, SystemExit) as error:  # mypyc exits where it finds an error
        if _is_asked_for:
            raise
        sys.stderr.write(f"ragcache: warning: the tree and the policies stay Python, about half as fast: {error}\n")
        return []
    return extensions


setup(ext_modules=_compiled_modules(), cmdclass={"build_ext": BuildExtensions})
