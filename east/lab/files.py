"""Read regular files only, write files atomically, clean up after killed writers, and name folders of results."""

import hashlib
import json
import os
import platform
import re
import shutil
import stat
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from east.choices import ConfigError

MADE_FROM = "made_from.json"  # in a folder of results: which input they are of
NAME_BYTES = 120  # of each of the two parts of its name; a file system takes 255 in all
STALE_SECONDS = 24 * 3600  # after which a temporary file from another machine counts as abandoned
LEFTOVER = re.compile(r"\..+\.(?P<machine>[0-9a-f]{8})-(?P<pid>\d+)\.\d+\.tmp")


def write_atomically(target: Path, content: bytes | str, replace: bool = True) -> None:
    """Write a temporary file in the same folder, flush it to disk, then rename it to `target`: a reader finds all of
    the old content or all of the new one, even after a kill.

    replace=False: FileExistsError if the file exists, even if it appeared a moment ago.
    """
    temporary = temporary_name(target)
    try:
        with _created(temporary) as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            os.replace(temporary, target)
        else:
            _link(temporary, target)
        _sync(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _created(file: Path) -> BinaryIO:
    """Create a file, and its folder if needed. Retry: another command may delete the folder while it is empty."""
    for _ in range(10):
        file.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            return open(file, "wb")
    return open(file, "wb")


def _link(temporary: Path, target: Path) -> None:
    """Give a file its final name, if it is free: of several processes exactly one succeeds, even on network disks."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise
    except OSError as error:  # a file system without links
        if target.exists():
            raise FileExistsError(f"{target} already exists") from error
        os.replace(temporary, target)


def _sync(path: Path) -> None:
    """Flush a file or the names in a folder to disk, so that neither is lost with the power."""
    with suppress(OSError):  # Windows opens no folders
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def replace_folder(finished: Path, target: Path) -> None:
    """Move a finished folder to `target`, in place of what is there; of several writers the last one wins.

    All of it is on disk before it has its name, because a name means that it is complete.
    """
    for path in (*finished.rglob("*"), finished):
        _sync(path)
    old = temporary_name(target)
    while finished.exists():
        with suppress(FileNotFoundError):
            target.rename(old)
        try:
            finished.rename(target)
        except OSError:
            if not target.exists():  # otherwise another process has just put its folder there
                with suppress(FileNotFoundError):
                    old.rename(target)
                raise
        shutil.rmtree(old, ignore_errors=True)
    _sync(target.parent)


def temporary_name(target: Path) -> Path:
    """A hidden name beside `target`, unique to this process and call, that says which process owns it."""
    return target.with_name(f".{target.name}.{machine()}-{os.getpid()}.{time.monotonic_ns()}.tmp")


@cache
def machine() -> str:
    """The name of the scope in which process ids are valid: one boot of one machine or container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        scope = f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        scope = f"{platform.node()} {uuid.getnode()}"
    return hashlib.blake2b(scope.encode(), digest_size=4).hexdigest()


def open_regular(file: str | Path) -> BinaryIO:
    """Open a regular file for reading; OSError for anything else. Opening a pipe would block forever."""
    descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError("it is a folder, not a file" if stat.S_ISDIR(mode) else "it is a pipe or a device, not a file")
    return open(descriptor, "rb")


def read_regular(file: str | Path, max_bytes: int) -> bytes:
    """The content of a regular file of at most `max_bytes`; OSError for anything else."""
    with open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > max_bytes:
            raise OSError(f"it has {size:,} bytes, more than the limit of {max_bytes:,}")
        return stream.read()


def yaml_content(file: Path) -> dict[str, Any]:
    """The names and values of a YAML file, which is parsed again only if it has changed; not to be modified."""
    return _parsed_yaml(file, file.stat().st_mtime_ns)


@cache
def _parsed_yaml(file: Path, _changed: int) -> dict[str, Any]:
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: expected names and values, got {type(content).__name__}")
    return content


def set_aside(file: Path) -> Path:
    """Rename a damaged file, so that it is out of the way but can be inspected; return its new name."""
    renamed = file.with_name(f"{file.name}.damaged")
    with suppress(OSError):  # for example in a read-only folder
        if renamed.is_dir() and not renamed.is_symlink():
            shutil.rmtree(renamed)
        os.replace(file, renamed)
    return renamed


def sweep(root: Path) -> None:
    """Remove what dead processes left below a folder: temporary files and folders, and empty folders."""
    for folder, folders, names in os.walk(root, topdown=False):
        for match in filter(None, map(LEFTOVER.fullmatch, (*folders, *names))):
            path = Path(folder, match[0])
            with suppress(OSError):  # another process was quicker
                if _abandoned(path, match["machine"], int(match["pid"])):
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        if Path(folder) != root:
            with suppress(OSError):  # usually it is not empty
                os.rmdir(folder)


def _abandoned(path: Path, owner: str, pid: int) -> bool:
    """True if nobody is writing this any more: its process has ended, or it is old and from another machine."""
    if owner == machine() and os.name == "posix":
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except OSError:  # the process belongs to another user
            return False
    return time.time() - path.lstat().st_mtime > STALE_SECONDS


def result_folder(parent: Path, name: str, suffix: str, made_from: Mapping[str, object]) -> Path:
    """parent/name-suffix, else name-2-suffix and so on: the first that is new or holds results of the same input.

    made_from: what identifies the input, with absolute paths; it is stored in the folder. A folder with files but
    without it is never used. Of commands that start together, the first to store it gets the folder.
    """
    name, suffix = (part.encode()[:NAME_BYTES].decode(errors="ignore") for part in (name, suffix))
    content = json.dumps(made_from, indent=2, sort_keys=True) + "\n"
    for k in count(1):
        title = f"{name}-{suffix}" if k == 1 else f"{name}-{k}-{suffix}"
        folder = parent / re.sub(r"[^\w.-]+", "_", title)
        file = folder / MADE_FROM
        if not folder.exists() or (folder.is_dir() and all(map(LEFTOVER.fullmatch, os.listdir(folder)))):
            with suppress(FileExistsError):  # another command was quicker, maybe with the same input
                write_atomically(file, content, replace=False)
        if file.is_file() and file.read_bytes() == content.encode():
            return folder
    raise AssertionError
