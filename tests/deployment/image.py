"""Build an image of examples/deployment without a registry, start it as a container, and ask it: ``make image-check``.

The image of Dockerfile.cpu is started and asked. That of Dockerfile is built over vLLM for the CPU in the place of
CUDA's, and its command line is asked for its version. A release (``--release``) builds over the bases that the
Dockerfiles name, and ``--push`` uploads what passed.

buildah builds with chroot isolation over a base that debootstrap makes; both are Debian packages, and need root. The
container is made of namespaces: another user without capabilities, a read-only root, /tmp mounted noexec, 64 MiB of
/dev/shm, and a folder as the image's volume.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import click
import requests

from tests.deployment.chart import objects, values_of

ROOT = Path(__file__).resolve().parents[2]
DEPLOYMENT = ROOT / "examples" / "deployment"
URL = "http://127.0.0.1:8000"
KEY = "a-key-of-the-image-check"
MIRROR = "http://deb.debian.org/debian"
BASE_PACKAGES = "ca-certificates,python3,python3-dev,python3-pip,python3-venv"
"""What python:3.11-slim has and Debian's smallest base has not: headers, too, for code that is compiled at run time."""
STARTUP_S = 300.0
WANTED_GIB = 16
"""Of disk space: a build took more than 11 GiB before its last stage."""
VERSION = ("ragcache", "--version")
ENTER = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec"]
CONTAINER = """
cd "$IMAGE_ROOT"
mount --bind . . && cd "$IMAGE_ROOT"
mount -t proc proc proc
mount --rbind /dev dev
mount --bind /sys sys && mount -o remount,bind,ro sys
mount -t tmpfs -o size=64m,mode=1777 tmpfs dev/shm
mount -t tmpfs -o mode=1777,noexec tmpfs tmp
mount --bind "$IMAGE_VOLUME" "./$VOLUME"
mount --bind /etc/resolv.conf etc/resolv.conf 2>/dev/null || true
mount -o remount,bind,ro .
exec chroot . setpriv --reuid "$IMAGE_USER" --regid "$IMAGE_USER" --clear-groups --no-new-privs \
  --inh-caps=-all --bounding-set=-all env -i "$@"
"""


@dataclass(frozen=True, slots=True)
class Built:
    """An image's configuration, and the folder at which its files are mounted."""

    root: Path
    config: Mapping[str, Any]

    @property
    def user(self) -> str:
        return str(self.config.get("User", ""))

    @property
    def environment(self) -> list[str]:
        return [*self.config.get("Env", ())]

    @property
    def entrypoint(self) -> list[str]:
        return [*(self.config.get("Entrypoint") or ())]

    @property
    def command(self) -> list[str]:
        return [*self.entrypoint, *(self.config.get("Cmd") or ())]

    @property
    def volume(self) -> str:
        (volume,) = self.config["Volumes"]
        return str(volume)


class Builder:
    """buildah with a storage of its own below a folder. :meth:`close` leaves the base and downloaded packages there.

    Args:
        folder: holds the storage.
        keeps_layers: whether :meth:`close` leaves a build's layers as well, for a shorter next one.
    """

    def __init__(self, folder: Path, *, keeps_layers: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        driver = "overlay" if can_overlay(folder) else "vfs"
        storage = ["--root", str(folder / "storage"), "--runroot", str(folder / "run"), "--storage-driver", driver]
        self._buildah = ["buildah", *storage]
        self._environment = {**os.environ, "TMPDIR": str(folder / "tmp")}
        self._keeps_layers = keeps_layers
        self._tags: list[str] = []
        (folder / "tmp").mkdir(exist_ok=True)

    def __call__(self, *arguments: str | Path) -> str:
        """Run a command of buildah, and return its output."""
        done = subprocess.run(
            [*self._buildah, *map(str, arguments)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            cwd=ROOT,
            env=self._environment,
        )
        return done.stdout.strip()

    def base(self, tag: str) -> str:
        """Return an image with Debian's Python, which is made once."""
        if tag in self("images", "--format", "{{.Name}}:{{.Tag}}").split():
            return tag
        with tempfile.TemporaryDirectory(dir=self.folder) as made:
            root = Path(made, "root")
            log = self.folder / "debootstrap.log"
            command = ["debootstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", "bookworm", str(root), MIRROR]
            with log.open("wb") as output:
                try:
                    subprocess.run(command, stdout=output, stderr=output, check=True)
                finally:  # debootstrap leaves it mounted
                    subprocess.run(["umount", "--lazy", root / "proc"], stderr=subprocess.DEVNULL, check=False)
            container = self("from", "scratch")
            self("add", "--quiet", container, root, "/")
            self("config", "--env", "PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", container)
            self("commit", "--quiet", "--rm", container, tag)
        return tag

    def build(self, dockerfile: Path, tag: str, base: str, *options: str) -> str:
        """Return ``tag``, built of a file over ``base`` with this machine's settings of pip."""
        revision = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
        arguments = {"BASE": base, "VERSION": version(), "REVISION": revision.stdout.strip() or "unknown"}
        given = [text for name, value in arguments.items() for text in ("--build-arg", f"{name}={value}")]
        volumes = [text for volume in pip_volumes(self.folder) for text in ("--volume", volume)]
        self(
            "bud",
            "--layers",
            "--isolation",
            "chroot",
            *volumes,
            *given,
            *options,
            "--tag",
            tag,
            "--file",
            dockerfile,
            ROOT,
        )
        self._tags.append(tag)
        return tag

    def as_base(self, tag: str, name: str) -> str:
        """Return ``name``: a built image without RAGCache and its user, in place of the base of another file."""
        container = self("from", "--pull-never", tag)
        removed = "pip uninstall --quiet --yes ragcache && userdel ragcache"
        self("run", "--isolation", "chroot", "--user", "root", container, "--", "sh", "-c", removed)
        self("config", "--user", "root", "--entrypoint", "[]", "--cmd", "", "--volume", "/cache-", container)
        shutil.rmtree(Path(self("mount", container), "cache"))
        self("umount", container)
        self("commit", "--quiet", "--rm", container, name)
        self._tags.append(name)
        return name

    def mounted(self, tag: str) -> Built:
        """Return an image with its files mounted."""
        container = self("from", "--pull-never", tag)
        facts = json.loads(self("inspect", "--type", "image", tag))
        return Built(Path(self("mount", container)), facts["OCIv1"]["config"])

    def push(self, tag: str, target: str) -> str:
        """Upload an image to ``target`` of a registry, and return its digest there."""
        digest = self.folder / "tmp" / "digest"
        self("push", "--quiet", "--digestfile", digest, tag, f"docker://{target}")
        return digest.read_text(encoding="utf-8").strip()

    def size(self, tag: str) -> str:
        """Return how large an image is, with its base."""
        return self("images", "--format", "{{.Size}}", tag)

    def close(self) -> None:
        """Remove containers and images, but for the base, and unmount the storage. A signal does not cut it short."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        removals = [["rm", "--all"]]
        if self._tags:
            removals.append(["rmi", "--force", *self._tags])
        if not self._keeps_layers:
            removals.append(["rmi", "--prune", "--force"])
        for removal in removals:
            with suppress(subprocess.CalledProcessError):  # each removes what it can
                self(*removal)
        subprocess.run(["umount", self.folder / "storage" / "overlay"], stderr=subprocess.DEVNULL, check=False)
        left = [path for path in (self.folder / "tmp").iterdir() if not path.name.startswith("buildah-cache")]
        subprocess.run(["rm", "--recursive", "--force", "--one-file-system", "--", *left], check=False)


def version() -> str:
    """Return the version of RAGCache that the images have."""
    (found,) = re.findall(r'__version__ = "(.*)"', (ROOT / "ragcache_core" / "_version.py").read_text(encoding="utf-8"))
    return str(found)


def can_overlay(folder: Path) -> bool:
    """Return whether overlay file systems can be mounted below ``folder``."""
    with tempfile.TemporaryDirectory(dir=folder) as made:
        low, up, work, at = (Path(made, name) for name in ("low", "up", "work", "at"))
        for each in (low, up, work, at):
            each.mkdir()
        options = f"lowerdir={low},upperdir={up},workdir={work}"
        done = subprocess.run(
            ["mount", "-t", "overlay", "-o", options, "overlay", at], capture_output=True, check=False
        )
        if done.returncode == 0:
            subprocess.run(["umount", at], check=True)
        return done.returncode == 0


def pip_volumes(folder: Path) -> list[str]:
    """Return volumes that bring this machine's settings of pip into a build, with the files that they name."""
    told = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    settings = dict(re.findall(r"^(?:\w+|:env:)\.([\w-]+)='(.*)'$", told.stdout, re.MULTILINE))
    volumes = []
    for name, value in settings.items():
        folders = [Path(word.removeprefix("file://")).parent for word in value.split() if word.startswith("file:///")]
        paths = folders + [Path(word) for word in value.split() if word.startswith("/")]  # an index's files are near it
        volumes += [f"{path}:{path}:ro" for path in paths if path.exists() and name != "cert"]
    if cert := settings.get("cert"):
        settings["cert"] = "/run/image-check.crt"
        volumes.append(f"{cert}:{settings['cert']}:ro")
    config = folder / "pip.conf"
    config.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items()), "utf-8")
    return [*volumes, f"{config}:/etc/pip.conf:ro"]


def inside(built: Built, volume: Path, command: Sequence[str], *variables: str) -> tuple[list[str], dict[str, str]]:
    """Return the command that runs another one inside a container, and the environment that it wants."""
    wanted = {
        "IMAGE_ROOT": str(built.root),
        "IMAGE_USER": built.user,
        "IMAGE_VOLUME": str(volume),
        "VOLUME": built.volume,
    }
    return [*ENTER, CONTAINER, "sh", *built.environment, *variables, *command], {**os.environ, **wanted}


@contextmanager
def started(built: Built, volume: Path, log: Path, command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command of an image in a container."""
    run, environment = inside(built, volume, command, f"RAGCACHE_API_KEY={KEY}", "HF_HUB_OFFLINE=1")
    with log.open("wb") as output, subprocess.Popen(run, env=environment, stdout=output, stderr=output) as process:
        try:
            yield process
        finally:
            process.kill()


def status(path: str, **request: Any) -> int:
    """Return the status of an answer of the container's server, 0 for none; a request with ``json`` is a POST."""
    method = "POST" if "json" in request else "GET"
    try:
        return requests.request(method, f"{URL}{path}", timeout=60, **request).status_code
    except requests.RequestException:
        return 0


def check(built: Built, folder: Path) -> None:
    """Start an image twice on one volume, and ask it.

    Raises:
        AssertionError: with what it does not do.
    """
    assert built.user not in ("", "0", "root"), "the image runs as root"
    labels = built.config.get("Labels", {})
    assert {"org.opencontainers.image.version", "org.opencontainers.image.revision"} <= labels.keys(), labels
    volume = Path(tempfile.mkdtemp(dir=folder, prefix="volume-"))
    shutil.chown(volume, int(built.user), int(built.user))
    of_chart = [*built.entrypoint, *chart_arguments()]
    try:
        starts_s = [serve_once(built, volume, folder / f"start-{number}.log", built.command) for number in (1, 2)]
        print(f"image-check: ready after {starts_s[0]:.0f} s, with the caches of its volume after {starts_s[1]:.0f} s")
        assert any(Path(volume, "compiled").rglob("*")), "nothing compiled is on the volume"
        for number, has_kv in ((3, False), (4, True)):
            serve_once(built, volume, folder / f"start-{number}.log", of_chart, disk_has_kv=has_kv)
        print("image-check: the chart's arguments start it, and a second start finds what the disk tier holds")
    finally:
        shutil.rmtree(volume)


def chart_arguments() -> list[str]:
    """Return the arguments that the chart gives the engine's container for the demo without a GPU."""
    (engine,) = (each for each in objects(values_of("cpu-demo")) if each["kind"] == "StatefulSet")
    arguments: list[str] = engine["spec"]["template"]["spec"]["containers"][0]["args"]
    return arguments


def disk_blocks() -> int:
    """Return how many blocks the container's disk tier has, 0 without one."""
    stats = requests.get(f"{URL}/v1/ragcache/stats", headers={"Authorization": f"Bearer {KEY}"}, timeout=60).json()
    return sum(int(tier["num_blocks"]) for tier in stats["tiers"] if tier["name"] == "disk")


def serve_once(
    built: Built, volume: Path, log: Path, command: Sequence[str], *, disk_has_kv: bool | None = None
) -> float:
    """Start a container, ask its routes and commands, and end it; return the seconds until it was ready.

    ``disk_has_kv`` says whether its disk tier has blocks before the first request; with ``None`` it has no such tier.
    """
    began_s = time.monotonic()
    with started(built, volume, log, command) as process:
        said = lambda: log.read_text("utf-8", "replace")[-3000:]  # noqa: E731
        while status("/ready") != 200:
            assert process.poll() is None, said()
            assert time.monotonic() < began_s + STARTUP_S, said()
            time.sleep(0.5)  # a poll: a container says nothing when it is ready
        duration_s = time.monotonic() - began_s
        assert (disk_blocks() > 0) is bool(disk_has_kv), "blocks of the disk tier before the first request"
        assert status("/health") == 200
        assert status("/v1/completions", json={}) == 401, "it answers without a key"
        key = {"Authorization": f"Bearer {KEY}"}
        model = requests.get(f"{URL}/v1/models", headers=key, timeout=60).json()["data"][0]["id"]
        asked = {"model": model, "prompt": "Zorval was", "max_tokens": 4}
        assert status("/v1/completions", json=asked, headers=key) == 200
        warm(built, volume)
        server = int(subprocess.check_output(["pgrep", "--parent", str(process.pid)], text=True))
        os.kill(server, signal.SIGTERM)
        process.wait(60)
        assert process.returncode == 0, said()
        assert "stopping: running requests have" in log.read_text("utf-8", "replace"), (
            "the log is not on standard output"
        )
    return duration_s


def warm(built: Built, volume: Path) -> None:
    """Index a folder and prefill its documents, with the commands inside the image."""
    documents = volume / "documents"
    documents.mkdir(exist_ok=True)
    (documents / "zorval.md").write_text("Zorval was a company founded by Anna. " * 20, "utf-8")
    at = built.volume
    index = ["ragcache", "index", f"{at}/documents", "--store", f"{at}/store"]
    for command in (
        *([index] if not (volume / "store").exists() else []),
        ["ragcache", "warm", "--store", f"{at}/store", "--url", URL, "--wait-ready"],
    ):
        run, environment = inside(built, volume, command, f"RAGCACHE_API_KEY={KEY}")
        done = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"


def output(built: Built, folder: Path, command: Sequence[str]) -> str:
    """Return what a command inside an image prints."""
    volume = Path(tempfile.mkdtemp(dir=folder, prefix="volume-"))
    run, environment = inside(built, volume, command)
    try:
        return subprocess.run(run, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    finally:
        shutil.rmtree(volume)


def inventory(built: Built, path: Path) -> None:
    """Write the Python packages of an image as CycloneDX."""
    packages = output(built, path.parent, ["python3", "-m", "pip", "--no-cache-dir", "list", "--format", "freeze"])
    command = [sys.executable, "-m", "cyclonedx_py", "requirements", "--output-file", str(path), "-"]
    subprocess.run(command, input=packages, text=True, check=True)
    print(f"image-check: {packages.count('==')} packages, listed in {path}")


def base_of(dockerfile: Path, given: str | None, *, is_release: bool) -> str:
    """Return the base image of a Dockerfile: ``given``, or its own. One without a digest is a warning.

    Raises:
        SystemExit: for a release whose base has no digest.
    """
    (own,) = re.findall(r"^ARG BASE=(\S+)", dockerfile.read_text(encoding="utf-8"), re.MULTILINE)
    base = given or own
    if not re.search(r"@sha256:[0-9a-f]{64}$", base):
        text = f"{dockerfile.name}: the base {base} has no digest: write ARG BASE={base.partition('@')[0]}@sha256:..."
        if is_release:
            sys.exit(f"ragcache: error: {text}")
        print(f"ragcache: warning: {text}", file=sys.stderr)
    return base


@click.command()
@click.option("--folder", type=click.Path(path_type=Path), default=ROOT / "build" / "images", show_default=True)
@click.option("--cpu-base", help="What Dockerfile.cpu builds upon. [default: a base that debootstrap makes]")
@click.option("--cuda-base", help="What Dockerfile builds upon. [default: vLLM for the CPU]")
@click.option("--torch-index", default="", help="An index with PyTorch's builds for the CPU. [default: pip's own]")
@click.option("--keep-layers", is_flag=True, help="Keep what was built, 8 GB, so that the next build is a short one.")
@click.option("--release", is_flag=True, help="Build over the bases that the Dockerfiles name; each needs a digest.")
@click.option("--push", help="With --release: the registry and its folder that the images go to, as ghcr.io/owner.")
def main(
    folder: Path,
    cpu_base: str | None,
    cuda_base: str | None,
    torch_index: str,
    keep_layers: bool,
    release: bool,
    push: str | None,
) -> None:
    """Build the images of examples/deployment; start and ask what does not need a GPU."""
    cpu, cuda = DEPLOYMENT / "Dockerfile.cpu", DEPLOYMENT / "Dockerfile"
    bases = [base_of(path, given, is_release=release) for path, given in ((cpu, cpu_base), (cuda, cuda_base))]
    if push and not release:
        sys.exit("ragcache: error: --push uploads what a release builds: give --release as well")
    if missing := [each for each in ("buildah", "debootstrap", "unshare", "setpriv") if shutil.which(each) is None]:
        sys.exit(f"ragcache: error: image-check needs {', '.join(missing)}: apt-get install buildah debootstrap")
    if os.getuid() != 0:
        sys.exit("ragcache: error: image-check needs root, for chroot and mounts")
    folder.mkdir(parents=True, exist_ok=True)
    if (free_gib := shutil.disk_usage(folder).free >> 30) < WANTED_GIB:
        print(f"ragcache: warning: {folder} has {free_gib} GiB free, images may take {WANTED_GIB}", file=sys.stderr)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what is mounted is unmounted
    builder = Builder(folder.resolve(), keeps_layers=keep_layers)
    index = ("--build-arg", f"TORCH_INDEX={torch_index}")
    tags = {"ragcache-cpu": "localhost/ragcache-cpu:check", "ragcache": "localhost/ragcache:check"}
    try:
        if release:
            cpu_base, cuda_base = bases
        cpu_base = cpu_base or builder.base(
            f"localhost/ragcache-base:{sha256(BASE_PACKAGES.encode()).hexdigest()[:12]}"
        )
        began_s = time.monotonic()
        image = builder.mounted(builder.build(cpu, tags["ragcache-cpu"], cpu_base, *index))
        took_s, size = time.monotonic() - began_s, builder.size(tags["ragcache-cpu"])
        print(f"image-check: built {cpu.name} in {took_s:.0f} s: {size}", flush=True)
        check(image, folder)
        inventory(image, folder / "ragcache-cpu.cdx.json")
        over = cuda_base or builder.as_base(tags["ragcache-cpu"], "localhost/vllm-cpu:check")
        image = builder.mounted(builder.build(cuda, tags["ragcache"], over))
        inventory(image, folder / "ragcache.cdx.json")
        print(f"image-check: built {cuda.name} over {over}: {output(image, folder, VERSION).strip()}")
        if push:
            digests = {name: builder.push(tag, f"{push}/{name}:{version()}") for name, tag in tags.items()}
            text = "".join(f"{name}={digest}\n" for name, digest in digests.items())
            (folder / "digests").write_text(text, encoding="utf-8")
            print(f"image-check: pushed to {push}:\n{text}", end="")
    finally:
        builder.close()


if __name__ == "__main__":
    main()
