"""A kill at any moment leaves complete records, none written twice, and a command that can be resumed.

Faults are injected in this process if that proves the same; otherwise real processes are killed.
"""

import contextlib
import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from east.lab import cli, files
from east.lab.training import engine
from tests import killed
from tests.commands import ROOT, children_of, count_records, descendants, record_files, start, wait_for
from tests.conftest import unsaved
from tests.made import ended_at_checkpoint

pytestmark = pytest.mark.usefixtures("no_figures")

# With batches of 1024 every trial is its own job.
SMALL = ["dataset=digits", "dataset.limit=400", "device=cpu", "preset=quick", "protocol.max_epochs=6", "model=mlp",
         "hyper.batch_size=1024", "protocol.decisions=[]", "annealing=none"]  # fmt: skip
INLINE = ["executor=inline"]
PROCESSES = ["executor=processes", "executor.slots=2"]


class Killed(BaseException):
    """Ends the command as kill -9 would: nothing catches it."""


def states(folder):
    """Record file -> (time, inode), which change when it is rewritten."""
    return {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in record_files(folder)}


def assert_complete(folder, trials):
    found = [json.loads(text) for text in record_files(folder).values()]
    assert sorted(record["seed"] for record in found) == list(range(trials))
    assert {record["status"] for record in found} == {"done"}


def results_of(folder):
    return {path.name: json.loads(text) for path, text in record_files(folder).items()}


def fail_at(monkeypatch, step, count, error):
    """Raise `error` at one step of writing the count-th file, and leave the temporary file behind."""
    written, real = [], files.write_atomically

    def write(target, content, **options):
        written.append(target)
        if len(written) != count:
            return real(target, content, **options)

        def interrupted(*_):
            raise error

        with monkeypatch.context() as broken:
            broken.setattr(Path, "unlink", lambda *_, **__: None)  # a killed process does not clean up
            for name in ["replace", "link"] if step == "not renamed" else ["fsync"]:
                broken.setattr(files.os, name, interrupted)
            return real(target, content[:9] if step == "half written" else content, **options)

    monkeypatch.setattr("east.lab.experiment.records.write_atomically", write)


@pytest.mark.parametrize("step", ["half written", "not on disk", "not renamed"])
@pytest.mark.parametrize("count", [1, 2, 3, 4])  # probabilities, then the record, of the first trial and the second
def test_a_kill_at_any_step_of_writing_a_record_can_be_resumed(step, count, tmp_path):
    command = [*SMALL, *INLINE, "trials=3", "protocol.max_epochs=1", "model.hidden=[8]", f"results_dir={tmp_path}"]
    with pytest.MonkeyPatch.context() as patch:
        fail_at(patch, step, count, Killed())
        with pytest.raises(Killed):
            cli.run(command)
    kept = states(tmp_path)
    assert len(kept) == (count - 1) // 2
    assert list(tmp_path.rglob("*.tmp")), "the fault left something behind"
    assert cli.run(command) == cli.DONE
    assert states(tmp_path).items() >= kept.items()
    assert_complete(tmp_path, 3)


def test_a_disk_that_fills_up_is_reported_and_survived(tmp_path, monkeypatch, capsys):
    """Trials that fit are kept, the others are named and are trained once there is room again."""
    command = [*SMALL, *INLINE, "trials=3", "protocol.max_epochs=1", "model.hidden=[8]", f"results_dir={tmp_path}"]
    with monkeypatch.context() as patch:
        fail_at(patch, "not on disk", 4, OSError(errno.ENOSPC, "No space left on device"))
        assert cli.run(command) == cli.FAILED
    told = capsys.readouterr()
    assert "No space left on device" in told.err
    assert "Traceback" not in told.err
    assert len(record_files(tmp_path)) == 2
    assert cli.run(command) == cli.DONE
    assert_complete(tmp_path, 3)


def test_a_killed_population_resumes_from_its_checkpoint(tmp_path, monkeypatch):
    """The second command continues the first one's trials and gives the results of an undisturbed run."""
    epochs = [f"protocol.{name}=12" for name in ("max_epochs", "stage_epochs", "patience")]
    command = [*SMALL, *INLINE, *epochs, "trials=3", "model.hidden=[8]"]
    load, loaded = engine.Population.load, []
    saved = ended_at_checkpoint(5, Killed(), lambda: cli.run([*command, f"results_dir={tmp_path / 'results'}"]))
    (stale,) = {path.parent for path in tmp_path.rglob("*.safetensors")}
    (stale / "of-another-grouping.safetensors").touch()
    monkeypatch.setattr(engine.Population, "load", lambda self, file: (loaded.append(file), load(self, file))[1])
    assert cli.run([*command, f"results_dir={tmp_path / 'results'}"]) == cli.DONE
    assert loaded == saved[:1]
    assert not list(tmp_path.rglob("*.safetensors"))
    assert cli.run([*command, f"results_dir={tmp_path / 'other'}"]) == cli.DONE
    ours, theirs = results_of(tmp_path / "results"), results_of(tmp_path / "other")
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name]["scores"] == theirs[name]["scores"]
        assert ours[name]["history"] == theirs[name]["history"]


def kill_again_and_again(folder, kills, trials):
    """kill -9 at random moments, with and without workers; existing records stay untouched."""
    dice, seen = random.Random(0), {}
    for number in range(kills):
        where = PROCESSES if number % 2 else INLINE
        process = start(*SMALL, *where, f"trials={trials}", f"results_dir={folder}")
        wanted = len(seen) + dice.randrange(4)
        wait_for(lambda: count_records(folder) >= wanted or process.poll() is not None)  # noqa: B023
        time.sleep(dice.random())
        trained = count_records(folder) > len(seen)  # else a slow machine may not have started workers yet
        below = descendants(process.pid)
        assert bool(below) == (where is PROCESSES) or not trained or process.poll() is not None
        process.kill()
        process.communicate()
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), 20)  # noqa: B023 (no orphans)
        now = states(folder)
        assert now.items() >= seen.items()
        seen = now
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kills", "trials"), [(3, 16), pytest.param(10, 40, marks=pytest.mark.nightly)], ids=["three", "ten"]
)
def test_kills_at_random_moments_lose_and_repeat_nothing(kills, trials, tmp_path):
    """The last run loses a worker as well; still all records exist, none broken, none written twice."""
    seen = kill_again_and_again(tmp_path, kills, trials)
    process = start(*SMALL, *PROCESSES, f"trials={trials}", f"results_dir={tmp_path}")
    wait_for(lambda: count_records(tmp_path) > len(seen) or process.poll() is not None)
    workers = [pid for child in children_of(process.pid) for pid in children_of(child)]  # below the fork server
    for pid in workers[-1:]:  # none if the last trials finished first
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert re.search(rf"digits f1 +{trials} ", out)
    assert states(tmp_path).items() >= seen.items()
    assert_complete(tmp_path, trials)


def group_of(leader):
    """Running processes of a process group."""
    stats = subprocess.run(["ps", "-eo", "pid=,pgid=,stat="], capture_output=True, text=True, check=True).stdout
    fields = [line.split() for line in stats.splitlines()]
    return [int(pid) for pid, group, state in fields if int(group) == leader and not state.startswith("Z")]


@pytest.mark.slow
@pytest.mark.parametrize("number, times", [(signal.SIGINT, 1), (signal.SIGINT, 3), (signal.SIGTERM, 1)])
def test_an_interrupted_run_exits_cleanly_and_resumes(tmp_path, number, times):
    """Ctrl-C reaches every process of the group, SIGTERM only the first: code 130, a hint, no traceback, no orphan.

    Pressing Ctrl-C repeatedly gives the same.
    """
    process = start(*SMALL, *PROCESSES, "trials=12", f"results_dir={tmp_path}")
    wait_for(lambda: count_records(tmp_path) >= 2 or process.poll() is not None)
    for k in range(times):
        time.sleep(0.1 * k)
        with contextlib.suppress(ProcessLookupError):  # the process ended first
            os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == cli.INTERRUPTED
    assert "What is finished is saved. Rerun the same command to resume." in err
    assert "Traceback" not in err
    assert "leaked" not in err
    wait_for(lambda: not group_of(process.pid), 20)
    kept = record_files(tmp_path)
    assert 2 <= len(kept) < 12
    assert cli.run([*SMALL, *INLINE, "trials=12", f"results_dir={tmp_path}"]) == cli.DONE
    assert_complete(tmp_path, 12)
    assert record_files(tmp_path).items() >= kept.items()


# Kills while a given file is being written


EIGHT = [*SMALL, *INLINE, "model.hidden=[8]", "trials=8"]
KILLED = ROOT / "tests" / "killed.py"
BY_DAY = [("checkpoint", "half written"), ("arrays", "renamed"), ("record", "not renamed")]
EVERY = [(kind, step) for kind in killed.NAMES for step in ("half written", "not renamed", "renamed")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The results of eight uninterrupted trials."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("east.lab.reporting.plots.save", unsaved)
        assert cli.run([*EIGHT, f"results_dir={folder}"]) == cli.DONE
    return folder


def reproducible_parts(folder):
    """The contents of all records and their arrays, except training time and commit."""
    found = {}
    for path, text in record_files(folder).items():
        record = {name: value for name, value in json.loads(text).items() if name not in ("seconds", "git", "digest")}
        arrays = {name: values.tolist() for name, values in np.load(path.with_suffix(".npz")).items()}
        found[path.relative_to(folder)] = record, arrays
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "step"), [pytest.param(*one, marks=() if one in BY_DAY else pytest.mark.nightly) for one in EVERY]
)
def test_a_kill_while_a_file_is_written_changes_no_result(kind, step, undisturbed, tmp_path):
    """Two of eight trials existed before. Rerunning the command gives the records of an undisturbed run."""
    folder = tmp_path / "results"
    shutil.copytree(undisturbed / "runs", folder / "runs")
    for path in record_files(folder):
        if path.stem not in ("seed-0", "seed-1"):
            path.unlink()
            path.with_suffix(".npz").unlink()
    before = states(folder)
    assert len(before) == 2
    process = start(KILLED, kind, step, *EIGHT, f"results_dir={folder}")
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    kept = states(folder)
    assert kept.items() >= before.items()
    assert len(kept) == 2 + ((kind, step) == ("record", "renamed"))
    assert bool(list(folder.rglob("*.tmp"))) == (step != "renamed" or kind == "record"), "a linked file has two names"
    assert cli.run([*EIGHT, f"results_dir={folder}"]) == cli.DONE
    assert states(folder).items() >= kept.items()
    assert reproducible_parts(folder) == reproducible_parts(undisturbed)
    assert not list(folder.rglob("*.tmp"))


@pytest.mark.slow
def test_four_identical_commands_finish_although_one_is_killed(undisturbed, tmp_path):
    """The others finish; no record is ever written twice."""
    command = [*EIGHT, f"results_dir={tmp_path}"]
    four = [start(KILLED, "checkpoint", "renamed", *command), *(start(*command) for _ in range(3))]
    seen = {}

    def ended():
        now = states(tmp_path)
        assert now.items() >= seen.items()
        seen.update(now)
        return all(process.poll() is not None for process in four)

    wait_for(ended)
    assert [process.returncode for process in four] == [-signal.SIGKILL, 0, 0, 0]
    assert reproducible_parts(tmp_path) == reproducible_parts(undisturbed)
    assert not list(tmp_path.rglob("*.tmp"))
