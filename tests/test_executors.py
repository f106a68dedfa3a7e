"""Executors: every job finishes exactly once, whatever happens to the process that runs it."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

import pytest
import torch
from joblib import cpu_count

from east.lab import cli
from east.lab.experiment import executors
from east.lab.experiment.executors import Lost, Place, execute
from east.lab.settings.settings import Executor
from tests.commands import ROOT, TINY, count_records, descendants, record_files, start, wait_for

pytestmark = pytest.mark.usefixtures("no_figures")


def square(job):
    """Return x squared, but die as often as the file `die` says."""
    deaths = Path(job["die"]) if "die" in job else None
    if deaths and (left := int(deaths.read_text())):
        deaths.write_text(str(left - 1))
        os.kill(os.getpid(), signal.SIGKILL)
    return job["x"] ** 2


def threads(job):
    import torch

    return torch.get_num_threads(), os.environ.get("CUDA_VISIBLE_DEVICES"), lambda: job["x"]


def sleep(job):
    Path(job["started"]).touch()
    time.sleep(job["seconds"])


def test_inline_runs_jobs_that_are_added_while_it_works():
    queue, seen = deque([{"x": 1}, {"x": 2}]), []
    for job, result in execute(square, queue, Place(Executor(name="inline"))):
        seen.append((job["x"], result))
        if job["x"] == 2:
            queue.append({"x": 3})
    assert seen == [(1, 1), (2, 4), (3, 9)]


def test_processes_survive_the_loss_of_their_workers(tmp_path):
    """One job dies once and is retried; one always dies and is given up; the others, one added late, continue."""
    (tmp_path / "once").write_text("1")
    (tmp_path / "always").write_text("9")
    queue = deque({"x": x} for x in range(4))
    queue.appendleft({"x": 5, "die": str(tmp_path / "once")})
    queue.append({"x": 6, "die": str(tmp_path / "always")})
    results = {}
    for job, result in execute(square, queue, Place(Executor(name="processes", retries=1), slots=(None, None))):
        assert job["x"] not in results
        results[job["x"]] = result
        if job["x"] == 5:
            queue.append({"x": 7})
    lost = results.pop(6)
    assert results == {x: x**2 for x in (0, 1, 2, 3, 5, 7)}
    assert lost == Lost("its process ended 2 times, with code -9, as when memory runs out")
    assert int((tmp_path / "always").read_text()) == 9 - 2


def test_a_worker_has_one_thread_and_the_gpu_of_its_slot_and_idle_ones_are_told(monkeypatch, capsys):
    """With one job for two workers, they are idle half of the time."""
    monkeypatch.setattr(executors, "WORTH_REPORTING", 0.0)
    place = Place(Executor(name="processes"), slots=("3", "3"))
    ((_, (count, gpu, classifier)),) = execute(threads, deque([{"x": 7}]), place)
    assert (count, gpu, classifier()) == (1, "3", 7), "and a result may hold a function"
    assert os.environ.get("CUDA_VISIBLE_DEVICES") is None
    told = re.search(r"2 workers, idle (\S+)% of \d.\d min", capsys.readouterr().err)
    assert told
    assert float(told[1]) == pytest.approx(50, abs=2)


def test_workers_end_with_the_process_that_started_them(tmp_path):
    """kill -9 of the parent leaves no orphan at work."""
    code = (
        "from collections import deque; from east.lab.experiment.executors import Place, execute; "
        "from east.lab.settings.settings import Executor; from tests.test_executors import sleep\n"
        f"if __name__ == '__main__': list(execute(sleep, deque([{{'started': '{tmp_path}/on', 'seconds': 99}}]), "
        "Place(Executor(name='processes'))))"
    )
    script = tmp_path / "parent.py"
    script.write_text(code)
    parent = start(script)
    try:
        wait_for(lambda: (tmp_path / "on").exists(), 120)
        children = descendants(parent.pid)
        assert children
    finally:
        parent.kill()
        parent.wait()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), 20)


def test_slots_are_gpus_if_there_are_any_and_cores_otherwise(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert executors.slots("auto") == executors.slots("cpu") == [None] * cpu_count()
    assert executors.slots("mps") == [None]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for visible, wanted in (("", ["0", "1"]), ("2,3", ["2", "3"]), ("GPU-a,GPU-b", ["GPU-a", "GPU-b"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert executors.slots("auto") == executors.slots("cuda") == wanted
    assert len(executors.slots("cpu")) == cpu_count()


def test_no_more_jobs_run_at_once_than_this_machine_has_cores_if_they_run_here(monkeypatch):
    monkeypatch.setattr(executors, "slots", lambda device: [None, None])
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for at_once, name, options in [
        (1, "inline", {}),
        (2, "ray", {}),  # started on this machine
        (1, "ray", {"parallel": 1}),
        (64, "ray", {"address": "head:6379"}),
        (2, "submitit", {"cluster": "local"}),
        (64, "submitit", {}),
    ]:
        place = Place(Executor(name=name, **options))
        assert place.parallel == place.width == at_once
    on_gpus = Place(Executor(name="ray", address="head:6379", gpus=1))
    assert (on_gpus.parallel, on_gpus.width) == (64, 1), "such a run is not divided"
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert [Place(Executor(name="ray", address=address)).parallel for address in (None, "local")] == [64, 2]


@pytest.mark.slow
def test_submitit_runs_jobs_and_reports_lost_ones(tmp_path):
    pytest.importorskip("submitit")
    (tmp_path / "always").write_text("9")
    executor = Place(Executor(name="submitit", cluster="local", minutes=5), folder=tmp_path / "log")
    queue, results = deque([{"x": 2}, {"x": 4, "die": str(tmp_path / "always")}]), {}
    for job, result in execute(square, queue, executor):
        results[job["x"]] = result
        if job["x"] == 2:
            queue.append({"x": 5})
    assert isinstance(results.pop(4), Lost)
    assert results == {2: 4, 5: 25}


def confusions(folder):
    """Seed -> confusion of every trial below a folder."""
    found = [json.loads(text) for text in record_files(folder).values()]
    return {record["seed"]: record["confusion"] for record in found}


def kill(process):
    for pid in [*descendants(process.pid), process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


@pytest.fixture
def ray_cluster(monkeypatch):
    """Two nodes on loopback: the address, and the process of the second node, which has most of the cores."""
    pytest.importorskip("ray")
    with socket.socket() as free, tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        for name, value in {
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONPATH": str(ROOT),
        }.items():
            monkeypatch.setenv(name, value)
        ray = [str(Path(sys.executable).parent / "ray"), "start", "--block", "--object-store-memory=100000000"]
        head = [*ray, "--head", "--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=1",
                "--include-dashboard=false", f"--temp-dir={folder}"]  # fmt: skip
        second = [*ray, f"--address=127.0.0.1:{port}", "--node-ip-address=127.0.0.3", "--num-cpus=2"]
        nodes = []
        try:
            for start_node in (head, second):
                nodes.append(subprocess.Popen(start_node, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
                for line in nodes[-1].stdout:
                    if "Ray runtime started" in line:
                        break
                assert nodes[-1].poll() is None
            yield f"127.0.0.1:{port}", nodes[1]
        finally:
            for node in nodes:
                kill(node)


# With batches of 1024 every trial is its own job.
JOBS = [*TINY, "dataset.limit=400", "hyper.batch_size=1024", "annealing=none"]


@pytest.mark.slow
def test_ray_survives_the_loss_of_a_node(tmp_path, ray_cluster):
    """One of two nodes is killed during the run: all trials finish, with the same results as executor=inline."""
    address, node = ray_cluster
    longer = ["trials=8", "model.hidden=[512,256,128]",
              *(f"protocol.{name}=60" for name in ("max_epochs", "stage_epochs", "patience"))]  # fmt: skip
    process = start(*JOBS, *longer, "executor=ray", f"executor.address={address}", f"results_dir={tmp_path / 'ray'}")
    wait_for(lambda: count_records(tmp_path / "ray") or process.poll() is not None)
    kill(node)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert "failed" not in err
    assert re.search(r"^digits f1 +8 ", out, re.MULTILINE), out
    assert cli.run([*JOBS, *longer, f"results_dir={tmp_path / 'inline'}"]) == cli.DONE
    assert len(confusions(tmp_path / "ray")) == 8
    assert confusions(tmp_path / "ray") == confusions(tmp_path / "inline")


@pytest.mark.parametrize("cluster", ["debug", pytest.param("local", marks=[pytest.mark.slow, pytest.mark.nightly])])
def test_submitit_trains_the_same_as_inline(tmp_path, cluster):
    """By day in this process, through submitit all the same; in separate processes at night."""
    pytest.importorskip("submitit")
    ours, theirs = tmp_path / "submitit", tmp_path / "inline"
    assert cli.run([*JOBS, "trials=2", "executor=submitit", f"executor.cluster={cluster}", f"results_dir={ours}"]) == 0
    assert cli.run([*JOBS, "trials=2", f"results_dir={theirs}"]) == 0
    assert len(confusions(ours)) == 2
    assert confusions(ours) == confusions(theirs)
