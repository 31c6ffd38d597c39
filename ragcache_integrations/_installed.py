"""Check whether a framework is installed, without importing it."""

from __future__ import annotations

from importlib.util import find_spec

from ragcache_core.errors import ConfigError


def check_installed(framework: str, *packages: str) -> None:
    """Raise an error that names the extra if one of a framework's ``packages`` is missing.

    Raises:
        ConfigError: one is missing.
    """
    for package in packages:
        try:
            is_there = find_spec(package) is not None
        except ModuleNotFoundError:  # not even what it is a part of
            is_there = False
        if not is_there:
            raise ConfigError(
                f"{package} is not installed, ragcache_integrations.{framework} needs it: "
                f'pip install "ragcache[{framework}]"'
            )
