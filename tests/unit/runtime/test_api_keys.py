"""A key that no request can carry is rejected where it is given, and is not shown."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from click.testing import CliRunner

from ragcache_core import Engine, Fleet
from ragcache_core.cli import cli
from ragcache_core.errors import ConfigError

NOWHERE = "http://127.0.0.1:9"
ENTRIES: dict[str, Callable[[str], object]] = {
    "connect": lambda key: Engine.connect(NOWHERE, api_key=key),
    "fleet": lambda key: Fleet.connect("dns+http://replicas.invalid:8000", api_key=key),
    "launch": lambda key: Engine.launch("/nowhere/model", api_key=key),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(
    ("key", "why"),
    [("of-a-file\n", "10 of 10"), (" of-a-file", "1 of 10"), ("of a\x00file", "5 of 9"), ("schlüssel", "5 of 9")],
)
def test_a_key_that_no_header_carries_is_rejected_at_every_entry(entry: str, key: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"^character {why} of the API key .*--from-literal") as raised:
        ENTRIES[entry](key)
    assert key.strip() not in str(raised.value)


def test_a_secret_with_a_line_feed_is_one_error_of_serve() -> None:
    done = CliRunner(env={"RAGCACHE_API_KEY": "of-a-file\n"}).invoke(cli, ["serve", "/nowhere/model"])
    assert done.exit_code == 1
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert "10 of 10 of the API key" in line


@pytest.mark.parametrize("key", ["k", "a key with spaces", "sk-0~!#$%&'*+/=?^_`{|}\""])
def test_a_key_that_a_header_carries_is_taken(key: str) -> None:
    with pytest.raises(Exception, match="no engine answers"):
        Engine.connect(NOWHERE, api_key=key)
