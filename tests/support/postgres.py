"""A Postgres server with pgvector for tests: in a folder of its own, on a socket there, and gone afterwards."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_TIMEOUT_S = 60


@contextmanager
def pgvector_server() -> Iterator[str]:
    """Yield the address of an empty database that has the extension; skip the test where none can be started."""
    psycopg = pytest.importorskip("psycopg")
    if (bin_folder := _bin_folder()) is None:
        pytest.skip("no Postgres server is installed: apt-get install postgresql")
    user = _unprivileged_user()
    with tempfile.TemporaryDirectory(prefix="ragcache-postgres-") as folder:
        if user is not None:
            os.chown(folder, pwd.getpwnam(user).pw_uid, -1)
        data = Path(folder) / "data"

        def run(program: str, *arguments: str) -> None:
            command = [str(bin_folder / program), "-D", str(data), *arguments]
            subprocess.run(command, check=True, user=user, cwd=folder, stdout=subprocess.DEVNULL, timeout=_TIMEOUT_S)

        run("initdb", "--auth=trust", "--username=tests", "--no-sync", "--locale=C", "--encoding=UTF8")
        options = f"-c listen_addresses='' -c unix_socket_directories={folder} -c fsync=off"
        run("pg_ctl", "start", "--wait", "--silent", f"--log={folder}/log", f"--options={options}")
        try:
            address = f"host={folder} user=tests dbname=postgres"
            with psycopg.connect(address, autocommit=True) as connection:
                known = connection.execute("SELECT 1 FROM pg_available_extensions WHERE name = 'vector'").fetchone()
                if known is None:
                    pytest.skip("this Postgres has no pgvector: apt-get install postgresql-15-pgvector")
                connection.execute("CREATE EXTENSION vector")
            yield address
        finally:
            run("pg_ctl", "stop", "--mode=immediate", "--silent")


def _bin_folder() -> Path | None:
    """Return where the server's programs are: on the path, or where Debian puts them."""
    if (found := shutil.which("initdb")) is not None:
        return Path(found).resolve().parent
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return folders[-1].parent if folders else None


def _unprivileged_user() -> str | None:
    """Return who runs the server, which refuses to be root's; ``None`` is who runs the tests."""
    return "nobody" if os.geteuid() == 0 else None
