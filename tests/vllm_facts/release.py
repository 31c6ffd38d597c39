"""Fetch a release of vLLM without installing it: ``python -m tests.vllm_facts.release 0.33.0 build/vllm-0.33.0``.

A folder that stands first in ``PYTHONPATH`` then is that release, on a machine that has another one for the CPU::

    build/vllm-0.33.0/
        vllm/                  the release's Python files; what is compiled is linked, from the vLLM that is installed
        vllm-0.33.0.dist-info/ the version, as that of a build for the CPU

So signatures are read of a release that no CPU build exists of yet, and engines run on its Python over the older one's
binaries. Nothing in the virtual environment is touched.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

_GLIBC = range(17, 42)
"""vLLM's wheels name the glibc that they were built for. Nothing compiled is taken from them, so any of them does."""
_PYTHON = {".py", ".json", ".jinja", ".txt", ".typed"}
_OLDER_BINARIES: dict[str, list[tuple[str, str, str]]] = {
    # file: an argument that the older binaries' function does not have
    "0.33": [("vllm/_custom_ops.py", "        v_scale,\n        interleaved_v,\n", "        v_scale,\n")],
}


def fetch(version: str, folder: Path) -> None:
    """Make ``folder``, as a whole or not at all."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as directory:
        wheel = _download(version, Path(directory))
        made = Path(directory) / folder.name
        with zipfile.ZipFile(wheel) as files:
            names = [name for name in files.namelist() if name.startswith("vllm/") and Path(name).suffix in _PYTHON]
            files.extractall(made, names)
        _link_binaries(made / "vllm")
        _fit_binaries(version, made)
        metadata = made / f"vllm-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)


def _download(version: str, folder: Path) -> Path:
    platforms = [f"manylinux_2_{minor}_{platform.machine()}" for minor in _GLIBC]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
    command += ["--only-binary=:all:", *(f"--platform={name}" for name in platforms), f"--dest={folder}"]
    if subprocess.run([*command, f"vllm=={version}"], check=False, stdout=sys.stderr).returncode:
        sys.exit(
            f"ragcache: error: vLLM {version} could not be downloaded (above is why), so nothing was checked: is the "
            "package index reachable, and is there such a release?"
        )
    return next(folder.glob("vllm-*.whl"))


def _link_binaries(package: Path) -> None:
    installed = find_spec("vllm")
    assert installed is not None
    assert installed.submodule_search_locations is not None
    origin = Path(installed.submodule_search_locations[0])
    for binary in origin.rglob("*.so"):
        link = package / binary.relative_to(origin)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(binary)


def _fit_binaries(version: str, folder: Path) -> None:
    for name, has, gets in _OLDER_BINARIES.get(".".join(version.split(".")[:2]), []):
        text = (folder / name).read_text(encoding="utf-8")
        assert text.count(has) == 1, f"{name} is not as {Path(__file__).name} expects it"
        (folder / name).write_text(text.replace(has, gets), encoding="utf-8")


if __name__ == "__main__":
    target = Path(sys.argv[2])
    target.parent.mkdir(exist_ok=True)
    fetch(sys.argv[1], target)
