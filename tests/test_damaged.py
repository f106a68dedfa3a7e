"""Damaged files: each is named with a reason and skipped, the command continues, and no number changes."""

import io
import json
import os
import random
import shutil
from pathlib import Path

import pytest

from east.lab import cli
from east.lab.experiment import records
from east.lab.experiment.record import Shared, parse
from east.lab.files import replace_folder
from east.lab.training import saved
from east.lab.training.scores import Cells, LazyScores, MatrixBatch
from tests.commands import TINY
from tests.made import ended_at_checkpoint
from tests.test_interruption import INLINE, SMALL, Killed, results_of
from tests.test_records import record

pytestmark = pytest.mark.usefixtures("no_figures")

COMMAND = [*SMALL, *INLINE, "trials=2", "protocol.max_epochs=4", "model.hidden=[8]"]


def messages(recorded):
    return [str(warning.message) for warning in recorded]


# Checkpoints


def flipped(content):
    """The content with one bit of the last tensor flipped, which no file format would notice."""
    return content[:-5] + bytes([content[-5] ^ 1]) + content[-4:]


DAMAGE = {
    "cut": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "garbage": lambda content: os.urandom(len(content)),
    "a flipped bit": flipped,
    "another version": lambda content: content.replace(b'"format":"3"', b'"format":"2"'),
}


def test_damaged_checkpoints_are_named_and_set_aside_and_their_trials_start_over(tmp_path, capsys):
    def results(folder):
        assert cli.run([*COMMAND, f"results_dir={tmp_path / folder}"]) == cli.DONE
        return {name: (record["scores"], record["history"]) for name, record in results_of(tmp_path / folder).items()}

    undisturbed = results("undisturbed")
    for kind, damage in DAMAGE.items():
        checkpoint, *_ = ended_at_checkpoint(3, Killed(), lambda: results(kind))  # noqa: B023
        checkpoint.write_bytes(damage(checkpoint.read_bytes()))
        assert results(kind) == undisturbed
        said = capsys.readouterr().err
        assert f"warning: {checkpoint} is a damaged checkpoint (" in said
        assert f"set aside as {checkpoint.name}.damaged, and its trials start over" in said


# Records


def changed(text, **values):
    """The JSON of a record with other values and no digest."""
    return json.dumps({**{k: v for k, v in json.loads(text).items() if k != "digest"}, **values})


REFUSED = {
    "cut": (lambda t: t[: len(t) // 2], "it is not JSON"),
    "empty": (lambda t: "", "it is not JSON: EOF"),
    "a list": (lambda t: "[1, 2]", "expected an object, got [1, 2]"),
    "bare": (lambda t: '{"schema": 1, "key": "x"}', "expected all fields of a record, missing: config"),
    "foreign": (lambda t: '{"name": "package.json"}', "expected all fields of a record, missing: config, seed"),
    "nested": (lambda t: "[" * 100_000, "it is not JSON: recursion limit"),
    "flipped": (lambda t: t.replace('"auroc":0.75', '"auroc":0.95'), "its content has changed since it was written"),
    "nan": (
        lambda t: changed(t, scores={"test": {"f1_pos": float("nan")}}),
        "scores.test.f1_pos: expected a finite number, got nan",
    ),
    "infinite": (
        lambda t: changed(t, scores={"test": {"f1_pos": 123.25}}).replace("123.25", "1e999"),
        "scores.test.f1_pos: expected a finite number, got inf",
    ),
    "stage": (lambda t: changed(t, stage="rehearsal"), "stage: expected 'search' or 'trial', got 'rehearsal'"),
    "status": (lambda t: changed(t, status="<script>"), "status: expected 'done' or 'failed', got '<script>'"),
    "seed": (lambda t: changed(t, seed=3), "it holds seed 3, which belongs in runs/mammography/f1/"),
    "epochs": (lambda t: changed(t, epochs="many"), "epochs: expected a valid integer, got 'many'"),
    "classes": (
        lambda t: changed(t, confusion={"test": {"classes": 200_001, "cells": []}}),
        "confusion.test.classes: expected less than or equal to 200000, got 200001",
    ),
    "cell": (
        lambda t: changed(t, confusion={"test": {"classes": 3, "cells": [[0, 3, 1]]}}),
        "confusion.test: expected cells of 3 classes, got one at row 0, column 3",
    ),
    "ragged": (lambda t: changed(t, confusion={"test": [[1, 2], [3]]}), "expected as many columns as rows"),
    "negative": (lambda t: changed(t, confusion={"test": [[-1]]}), "expected greater than or equal to 0, got -1"),
    "extra": (lambda t: changed(t, colour="red"), "unknown field 'colour'"),
    "newer": (lambda t: changed(t, schema=2, rows=[]), "expected schema 1, got 2; it comes from a newer version"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_an_invalid_record_is_named_with_its_reason_and_skipped(kind, tmp_path):
    good, bad = records.write(tmp_path, record()), records.write(tmp_path, record(seed=7))
    damage, reason = REFUSED[kind]
    bad.write_text(damage(bad.read_text()))
    with pytest.warns(UserWarning, match="not") as recorded:
        assert [one.source for one in records.scan(tmp_path)] == [str(good.relative_to(tmp_path))]
    (line,) = messages(recorded)
    assert line.startswith(f"{bad} is not a record (")
    assert reason in line
    assert line.endswith("; skipped")


def odd_things(folder: Path) -> None:
    """Put links, a folder and a pipe where records are expected."""
    (folder / "seed-21.json").symlink_to(folder / "nowhere")
    (folder / "seed-22.json").symlink_to(folder / "seed-22.json")
    (folder / "seed-23.json").mkdir()
    os.mkfifo(folder / "seed-24.json")
    runs = folder.parents[2]
    (runs / "circle").symlink_to(runs / "circle")
    (runs / "up").symlink_to(runs.parent)


def test_links_folders_and_pipes_are_named_and_skipped(tmp_path):
    folder = records.write(tmp_path, record()).parent
    odd_things(folder)
    with pytest.warns(UserWarning, match="not") as recorded:
        assert len(records.scan(tmp_path)) == 1
    lines = "\n".join(messages(recorded))
    assert f"{folder / 'seed-21.json'} is not a record (it is a link that leads nowhere); skipped" in lines
    assert f"{folder / 'seed-22.json'} is not a record (Too many levels of symbolic links); skipped" in lines
    assert f"{folder / 'seed-23.json'} is not a record (it is a folder, not a file); skipped" in lines
    assert f"{folder / 'seed-24.json'} is not a record (it is a pipe or a device, not a file); skipped" in lines
    assert "circle is not a record (" in lines


def test_bad_lines_of_an_export_are_named_by_their_number(tmp_path):
    for seed in range(3):
        records.write(tmp_path / "here", record(seed=seed))
    records.export(tmp_path / "here")
    file = tmp_path / "records" / "mammography.jsonl"
    shutil.copytree(tmp_path / "here" / "records", file.parent)
    first, second, third = file.read_bytes().splitlines()
    file.write_bytes(b"\n".join([first, b"\xff\xfe" + second, b"", third.replace(b"0.75", b"0.85")]) + b"\n")
    with pytest.warns(UserWarning, match="not") as recorded:
        assert [one.seed for one in records.scan(tmp_path)] == [0]
    lines = messages(recorded)
    assert lines[0].startswith(f"{file}, line 2, is not a record (it is not JSON")
    assert lines[1] == f"{file}, line 4, is not a record (its content has changed since it was written); skipped"


def test_many_damaged_files_are_counted(tmp_path):
    folder = records.write(tmp_path, record()).parent
    for seed in range(1, 101):
        (folder / f"seed-{seed}.json").write_text("")
    with pytest.warns(UserWarning, match="not") as recorded:
        assert len(records.scan(tmp_path)) == 1
    lines = messages(recorded)
    assert len(lines) == 6
    assert lines[-1] == f"95 others are not records below {tmp_path}; skipped"


def test_a_record_of_a_newer_version_is_never_overwritten(tmp_path, east_run):
    assert east_run(*TINY).code == cli.DONE
    file = sorted(tmp_path.rglob("seed-0.json"))[0]
    newer = changed(file.read_text(), schema=2)
    file.write_text(newer)
    for force in ("false", "true"):
        answer = east_run(*TINY, f"force={force}")
        assert answer.code == cli.FAILED
        assert f"{file} is not a record (expected schema 1, got 2; it comes from a newer version of east)" in answer.err
        assert "of 2 trials, 0 failed, 1 missing" in answer.out
        assert file.read_text() == newer
    with pytest.raises(FileExistsError, match="comes from a newer version of east and is not overwritten"):
        records.write(tmp_path, parse(changed(newer, schema=1).encode(), Shared(), {}), force=True)


@pytest.mark.parametrize("task", ["table", "report", "records", "run", "reproduce"])
def test_every_task_works_despite_damaged_files(task, tmp_path, tiny_results, east_run):
    shutil.copytree(tiny_results, tmp_path / "results")
    folder = next((tmp_path / "results" / "runs").glob("digits/*/*"))
    odd_things(folder)
    (folder / "seed-5.json").write_bytes(b"\xff\xfe")
    (tmp_path / "results" / "records").mkdir(exist_ok=True)
    (tmp_path / "results" / "records" / "digits.jsonl").write_bytes(b"\x80\n{}\n")
    command = {
        "run": [*TINY, "dataset.limit=null"],
        "reproduce": ["task=reproduce", "table=quickstart", "dry_run=true"],
    }.get(task, [f"task={task}"])
    answer = east_run(*command, f"results_dir={tmp_path / 'results'}")
    assert answer.code == cli.DONE, answer.err
    assert "Traceback" not in answer.err
    named = "seed-21.json is not a record (it is a link that leads nowhere); skipped" in answer.err
    assert named == (task != "report"), "the page shows what other commands have rendered"


# What cannot be read is never replaced, and what is incomplete is never called done


@pytest.mark.parametrize("kind", ["closed", "breaks off", "closed folder"])
def test_an_export_that_cannot_be_read_to_its_end_is_not_replaced(kind, tmp_path, monkeypatch):
    """A colleague's umask, or a disk that fails after the first lines; root ignores permissions, so it is simulated."""
    for seed in range(3):
        records.write(tmp_path, record(seed=seed))
    records.export(tmp_path)
    for file in (tmp_path / "runs").rglob("seed-[12].json"):
        file.unlink()
    exported = {file: file.read_bytes() for file in (tmp_path / "records").iterdir()}
    real = records.open_regular, os.listdir

    def refused(path, *_):
        if str(path).endswith(("mammography.jsonl", "/records")):
            raise PermissionError(13, "Permission denied")
        return real[kind == "closed folder"](path)

    def breaking(path):
        content = real[0](path).read()
        stream = io.BytesIO(content[: len(content) // 2])
        stream.readline = lambda size, read=stream.readline: read(size) or refused("/records")
        return stream

    if kind == "closed folder":
        monkeypatch.setattr(os, "listdir", refused)
    else:
        monkeypatch.setattr(records, "open_regular", refused if kind == "closed" else breaking)
    with pytest.raises(OSError, match="Nothing is exported"), pytest.warns(UserWarning, match="Permission denied"):
        records.export(tmp_path)
    monkeypatch.undo()
    assert {file: file.read_bytes() for file in (tmp_path / "records").iterdir()} == exported


LARGE = 10**400
SPARSE = {"classes": 200_000, "cells": [[0, 0, 1]]}
HOSTILE = {  # values that passed as a record once and ended a command later; None: they are valid
    "sizes": ({"data": {"sizes": {"test": "many"}}}, "data.sizes"),
    "NaN sizes": ({"data": {"sizes": {"test": float("nan"), "train": 1}}}, "data.sizes"),
    "infinite sizes": ({"data": {"sizes": {"train": float("inf")}}}, "data.sizes"),
    "a large score": ({"scores": {"test": {"auroc": LARGE}}}, "scores.test.auroc"),
    "a score of 17": ({"scores": {"test": {"auroc": 17.0}}}, "scores.test: auroc: expected -1 to 1"),
    "large seconds": ({"seconds": LARGE}, "seconds"),
    "a large loss": ({"best": {"val_loss": 1e308}}, "best.val_loss"),
    "a large count": ({"confusion": {"test": [[LARGE]]}}, "confusion.test"),
    "no class": ({"confusion": {"test": []}}, "confusion.test"),
    "a positive class of nobody": ({"data": {"positive": 99}}, "data.positive: expected one of 10 classes"),
    "no matrix": ({"confusion": {}}, None),
    "no score": ({"scores": {}, "decisions": {}}, None),
    "very many classes": ({"confusion": {"test": SPARSE, "val": SPARSE}, "decisions": {}}, None),
}


def test_bad_records_stop_no_command(tmp_path, tiny_results, east_run):
    shutil.copytree(tiny_results / "runs", tmp_path / "runs")
    template = min((tmp_path / "runs").rglob("seed-0.json"))
    for seed, (values, _) in enumerate(HOSTILE.values(), 50):
        template.with_name(f"seed-{seed}.json").write_text(changed(template.read_text(), seed=seed, **values))
    folder = records.ResultsFolder(tmp_path)
    with pytest.warns(UserWarning, match="is not a record"):
        read = {one.seed for one in folder.records()}
    for seed, (kind, (_, reason)) in enumerate(HOSTILE.items(), 50):
        refused = any(f"seed-{seed}.json is not a record ({reason}" in message for message in folder.refused)
        assert (refused, seed in read) == (reason is not None, reason is None), kind
    for command in ([*TINY, "dataset.limit=null", "trials=60"], ["task=table", "table=grid"], ["task=records"]):
        answer = east_run(*command)
        assert answer.code == cli.DONE, answer.err
        assert "Traceback" not in answer.err
    assert len(list(template.parent.glob("*.damaged"))) == len(folder.refused), "and they are trained again"


def test_matrices_of_very_many_classes_are_compared_and_scored_as_cells():
    one = Cells(200_000, [[0, 0, 2], [7, 7, 1]])
    assert one == Cells(200_000, [[7, 7, 1], [0, 0, 2]]) != Cells(200_000, [[7, 7, 1]])
    assert Cells(2, [[0, 1, 3]]) == [[0, 3], [0, 0]] != Cells(2, [[0, 1, 4]])
    assert len(list(Cells(2001, []))) == 2001
    scores = LazyScores(MatrixBatch(None), [one], False, {})
    assert (scores["accuracy"], scores["balanced_accuracy"], scores["f1_pos"]) == (1.0, 1.0, None)


@pytest.mark.parametrize("name", ["weights.safetensors", "model.json"])
def test_an_incomplete_model_is_not_done_and_saved_again(name, tmp_path, east_run):
    command = [*TINY, "trials=1", "save_model=true"]
    assert east_run(*command).code == cli.DONE
    for folder_of_model in (tmp_path / "models").iterdir():
        (folder_of_model / name).write_bytes(b"")
    assert east_run(*command).code == cli.DONE
    assert all(saved.is_intact(folder_of_model) for folder_of_model in (tmp_path / "models").iterdir())


def test_a_trial_whose_arrays_have_changed_is_named_and_trained_again(tmp_path, tiny_results, east_run):
    """Deleted arrays are no damage: who needs space may do that."""
    shutil.copytree(tiny_results / "runs", tmp_path / "runs")
    deleted, damaged = sorted((tmp_path / "runs").rglob("*.npz"))
    before = damaged.read_bytes()
    deleted.unlink()
    damaged.write_bytes(before[:-1])
    command = [*TINY, "dataset.limit=null"]
    answer = east_run(*command)
    assert answer.code == cli.DONE
    assert f"{damaged} has changed since its record was written; its trial is trained again" in answer.err
    assert damaged.read_bytes() == before
    assert not deleted.exists()
    set_aside = {file.name for file in damaged.parent.glob("*.damaged")}
    assert set_aside == {damaged.with_suffix(ending).name for ending in (".json.damaged", ".npz.damaged")}
    assert "has changed" not in east_run(*command).err


def test_a_folder_gets_its_name_only_when_all_of_it_is_on_disk(tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: done.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    monkeypatch.setattr(Path, "rename", lambda self, to, real=Path.rename: (done.append(str(self)), real(self, to)))
    finished = tmp_path / "finished"
    (finished / "deep").mkdir(parents=True)
    (finished / "deep" / "file").write_text("content")
    replace_folder(finished, tmp_path / "target")
    synced, (renamed, parent) = done[:-2], done[-2:]
    assert {*synced} - {str(tmp_path / "target")} == {str(finished / name) for name in ("deep/file", "deep", "")}
    assert (renamed, parent) == (str(finished), str(tmp_path))


@pytest.mark.parametrize("kind", ["copied", "seed twice"])
def test_a_misplaced_record_does_not_block_its_trial(kind, tmp_path):
    """What the scan refuses is not done for anybody: it is set aside, and the trial recorded."""
    files = [records.write(tmp_path, record(seed=seed)) for seed in range(2)]
    text = files[1].read_text() if kind == "copied" else changed(files[0].read_text())[:-1] + ', "seed": 1}'
    files[0].write_text(text)
    with pytest.warns(UserWarning, match="it holds seed 1, which belongs in runs/mammography"):
        assert [one.seed for one in records.scan(tmp_path)] == [1]
    assert records.status(files[0]) == "unreadable"
    records.write(tmp_path, record())
    assert [one.seed for one in records.scan(tmp_path)] == [0, 1]
    assert files[0].with_name("seed-0.json.damaged").read_text() == text


# Random damage


def mutated(content, dice):
    """The content with some bytes flipped, cut, repeated or inserted."""
    data = bytearray(content)
    for _ in range(dice.randrange(1, 4)):
        at = dice.randrange(len(data) + 1)
        kind = dice.randrange(4)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << dice.randrange(8)
        elif kind == 1:
            del data[at : at + dice.randrange(1, 200)]
        elif kind == 2:
            data[at:at] = data[at : at + dice.randrange(1, 50)]
        else:
            data[at:at] = dice.randbytes(dice.randrange(1, 9))
    return bytes(data)


@pytest.mark.parametrize("count", [100, pytest.param(1_000, marks=pytest.mark.nightly)])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_no_random_damage_to_a_results_folder_crashes_or_changes_a_number(count, tmp_path):
    """Random damage to records and exports."""
    dice = random.Random(0)
    written = [records.write(tmp_path, record(seed=seed, score=0.3 + seed / 10)) for seed in range(3)]
    records.export(tmp_path)
    true = {(r.key, r.seed): (r.scores, r.confusion, r.best) for r in records.scan(tmp_path)}
    files = [path for path in sorted(tmp_path.rglob("*")) if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".jsonl"}
    whole = {path: path.read_bytes() for path in files}
    for _ in range(count):
        for path in dice.sample(files, dice.randrange(1, len(files) + 1)):
            path.write_bytes(mutated(whole[path], dice))
        found = {(r.key, r.seed): (r.scores, r.confusion, r.best) for r in records.scan(tmp_path)}
        assert all(true[which] == values for which, values in found.items())
        intact = {seed for seed, path in enumerate(written) if path.read_bytes() == whole[path]}
        assert intact <= {seed for _, seed in found}, "damage to one file hides no other record"
        for path, content in whole.items():
            path.write_bytes(content)
