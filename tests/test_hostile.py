"""Files from strangers: text stays text, targets are not imported, and inconsistent models are refused."""

import contextlib
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
from functools import reduce
from html import unescape
from operator import getitem
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from sklearn.neighbors import KNeighborsClassifier

import east
from east.lab import cli, data
from east.lab.data import DataError
from east.lab.experiment import records
from east.lab.tasks import report
from tests.commands import TINY
from tests.made import GOLDEN, rendered
from tests.test_damaged import mutated
from tests.test_saved import people, trained

EVIL = "<script>document.title='ran'</script>\"'><img src=x onerror=\"document.title='ran'\">\\input{evil}$%&"


def planted(value):
    """A JSON value with every string and number in it replaced by EVIL."""
    if isinstance(value, dict):
        return {name: planted(item) for name, item in value.items()}
    if isinstance(value, list):
        return [planted(item) for item in value]
    return value if value is None or isinstance(value, bool) else EVIL


def source():
    return next(r for r in records.scan(GOLDEN) if r.config.dataset.name == "digits" and r.stage == "trial")


def hostile_results(folder):
    """Write a record with markup in each of its free texts, one file per field with markup in its numbers as well, and
    a study's drawing with a script."""
    golden = source()
    config = golden.config.but(preset=EVIL, protocol=golden.config.protocol.but(name=EVIL))
    free = {
        "git": EVIL,
        "device": EVIL,
        "stopped": EVIL,
        "versions": {EVIL: EVIL},
        "data": {"name": EVIL, EVIL: [EVIL]},
    }
    free |= {"decisions": {EVIL: {"scores": {"test": {EVIL: 0.5}}}}, "history": {EVIL: [1.0, 2.0], "val_loss": [1, 2]}}
    file = records.write(folder, golden.but(config=config, source="", **free))
    records.write(folder, golden.but(config=config, seed=1, status="failed", error=EVIL))
    whole = {name: value for name, value in json.loads(file.read_text()).items() if name != "digest"}
    for number, name in enumerate(whole, 100):
        bad = {**whole, name: planted(whole[name])}
        file.with_name(f"seed-{number}.json").write_text(json.dumps(bad))
    for name in ("figures", "tables"):
        (folder / name).mkdir()
    for file in ("figures/script.svg", f"figures/{EVIL.replace('/', '')}.svg"):
        (folder / file).write_text(f'<svg xmlns="http://www.w3.org/2000/svg">{EVIL}</svg>')
    (folder / "tables" / "grid.md").write_text(rendered("grid", folder))
    (folder / "tables" / "theirs.md").write_text(f"# {EVIL}\n\n| {EVIL} |\n|---|\n| {EVIL} |\n\n{EVIL}")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    with pytest.warns(UserWarning, match="not"):
        hostile_results(folder)
    return folder, report.index(folder)


def test_text_of_a_record_stays_text_in_a_page(hostile):
    _, text = hostile
    assert "<script" not in text
    assert "onload" not in text
    assert re.findall("<img src=[^>]{9}", text) == 2 * ['<img src="figures/'], "the drawings, in which nothing runs"
    assert "&lt;script&gt;" in text


WITNESS = """<script>
const all = [...document.querySelectorAll("*")];
const seen = { title: document.title, text: document.body.textContent, scripts: document.scripts.length,
  images: document.querySelectorAll("img:not([src$='.svg'])").length,
  links: all.filter((e) => /^(javascript|http)/i.test(e.getAttribute("href"))).length,
  handlers: all.filter((e) => [...e.attributes].some((a) => a.name.startsWith("on"))).length,
  requests: performance.getEntriesByType("resource").filter((r) => !r.name.startsWith("file:")).length };
const found = document.body.appendChild(document.createElement("pre"));
found.id = "found"; found.textContent = JSON.stringify(seen);
</script>"""


def browse(text, folder):
    """Open the page with a witness in it; return what the witness saw, and the browser's console messages."""
    installed = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome", "chrome"))
    browser = os.environ.get("CHROME_PATH") or next(filter(None, installed), None)
    if not browser:
        pytest.skip("no browser: neither chromium nor chrome is installed, and CHROME_PATH names none")
    file = folder / "probe.html"
    file.write_text(text.replace("</body>", WITNESS + "</body>"), encoding="utf-8")
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command = [browser, *flags, "--enable-logging=stderr", "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(unescape(re.findall(r'<pre id="found">(.*?)</pre>', done.stdout, flags=re.S)[-1])), console


def assert_nothing_ran(page, folder):
    """In a browser, EVIL has not changed the title, and every script, handler, image and link is ours."""
    seen, console = browse(page, folder)
    assert "<script>document.title='ran'</script>" in seen["text"], "it is shown, as text"
    assert seen["title"] != "ran"
    assert seen["scripts"] <= 1, "the witness"
    assert [seen[name] for name in ("images", "links", "handlers", "requests")] == [0, 0, 0, 0]
    assert console == []


@pytest.mark.slow
def test_nothing_in_a_hostile_record_runs_in_a_browser(hostile, tmp_path):
    assert_nothing_ran(hostile[1], tmp_path)


@pytest.mark.slow
def test_the_browser_check_notices_a_script(hostile, tmp_path):
    """The same page with one script let through."""
    page = hostile[1].replace("<main", "<script>document.title='ran'</script><main", 1)
    assert browse(page, tmp_path)[0]["title"] == "ran"


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """The page of task=compare for a table whose header, classes, words and file name are markup."""
    folder = tmp_path_factory.mktemp("comparison")
    dice = np.random.default_rng(0)
    frame = pd.DataFrame({EVIL: dice.normal(size=90), f"b{EVIL}": dice.choice([EVIL, "word"], 90)})
    frame[f"c{EVIL}"] = np.where(frame[EVIL] + dice.normal(size=90) > 0, f"1{EVIL}", f"0{EVIL}")
    file = folder / f"{EVIL.replace('/', '')}.csv"
    frame.to_csv(file, index=False)
    command = ["task=compare", f"dataset.path={file}", f"dataset.target=c{EVIL}", "candidates=[logistic]"]
    assert cli.run([*command, "device=cpu", f"results_dir={folder / 'results'}"]) == cli.DONE
    (page,) = (folder / "results").rglob("report.html")
    return page.read_text(encoding="utf-8")


def test_text_of_a_table_stays_text_in_a_page(comparison):
    assert "<script" not in comparison
    assert "<img" not in comparison
    assert "&lt;script&gt;" in comparison


@pytest.mark.slow
def test_nothing_in_a_hostile_table_runs_in_a_browser(comparison, tmp_path):
    assert_nothing_ran(comparison, tmp_path)


def test_text_of_a_record_stays_text_in_latex(hostile):
    text = rendered("grid", hostile[0], "latex")
    assert not re.search(r"\\input\{evil\}", text)
    assert r"\textbackslash" in text or "evil" not in text


STEERS = "\x1b[31mred\x07\u202eder"


@pytest.mark.parametrize("place", ["record", "table", "command"])
def test_nothing_from_a_file_steers_the_terminal(place, tmp_path, east_run):
    """Escape sequences, bells and marks that reverse the writing, from a record, a user's table, or a typed name."""
    if place == "record":
        given = source().but(git=STEERS, error=STEERS, status="failed", source="")
        bad = records.write(tmp_path, given).with_name("seed-77.json")
        bad.write_text(json.dumps({"schema": 1, "stage": STEERS}, ensure_ascii=False))
        command = ["task=table", "table=grid", "preset=quick"]
    else:
        file = tmp_path / ("people.csv" if place == "table" else f"{STEERS}.csv")
        classes = np.array([STEERS, "plain"])[np.arange(40) % 2]
        pd.DataFrame({STEERS: np.arange(40.0), "income": classes}).to_csv(file, index=False)
        command = ["task=data", f"dataset.path={file}" if place == "table" else f"dataset.path='{file}'"]
        command += ["dataset.target=income"]
    answer = east_run(*command)
    said = answer.out + answer.err
    assert "red" in said
    assert not set(said) & set("\x1b\x07\u202e")


# Models


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A network and a forest on one table, saved."""
    folder = tmp_path_factory.mktemp("models")
    people().to_csv(folder / "people.csv", index=False)
    table = data.load("csv", path=str(folder / "people.csv"), target="income", categorical=["postcode"])
    for loss in ("ce", "rf", "boosting", "stack"):
        trained(table, loss=loss)[0].save(folder / loss)
    return folder


def edited(model, target, about=None, tensors=None):
    """A copy of a saved model with other values and without a digest, which would not match."""
    shutil.copytree(model, target)
    values = json.loads((target / "model.json").read_text())
    del values["digest"]
    (target / "model.json").write_text(json.dumps({**values, **(about or {})}))
    weights = load_file(target / "weights.safetensors")
    save_file({**weights, **(tensors(weights) if tensors else {})}, target / "weights.safetensors")
    return target


def encoding(names, **others):
    """Of columns of numbers."""
    columns = [{"name": name, "kind": "numeric", "median": 0.0, "indicator": False} for name in names]
    return {"columns": columns, "target": None, "classes": [], "positive": None, **others}


FIRST, MEMBER, LAST = "net.layers.0.weight", "net.predictors.0.", "net.predictors.4.present"
UNFIT = {
    "NaN weights": ("ce", {}, lambda w: {FIRST: w[FIRST] * np.nan}, "net.layers.0.weight: expected finite numbers"),
    "a scale of 0": ("ce", {}, lambda w: {"std": w["std"] * 0}, "std: expected no zeros"),
    "another shape": ("ce", {}, lambda w: {FIRST: w[FIRST].T.contiguous()}, "size mismatch for layers.0.weight"),
    "another layer": ("ce", {}, lambda w: {"net.layers.9.weight": w[FIRST].clone()}, "loading state_dict for MLP"),
    "too wide": ("ce", {"model": {"name": "mlp", "hidden": [10**12] * 2}}, None, "model.json: "),
    "too deep": ("ce", {"model": {"name": "mlp", "hidden": [1] * 10**5}}, None, "at most 1,000 layers"),
    "other widths": ("ce", {"model": {"name": "mlp", "hidden": [10**7]}}, None, "size mismatch"),
    "no classes": ("ce", {"classes": []}, None, "classes: List should have at least 2 items"),
    "classes twice": ("ce", {"classes": ["a", "a"]}, None, "expected each name once"),
    "positive": ("ce", {"positive": 7}, None, "positive: expected one of 2 classes, got number 7"),
    "a rule": ("ce", {"rule": {"weights": [1.0]}}, None, "rule: it does not fit 2 classes"),
    "no encoding": ("ce", {"encoding": {"columns": 3}}, None, "the encoding"),
    "another encoding": ("ce", {"encoding": encoding(["age"])}, None, "expected columns of 9 features, got 1"),
    "columns twice": ("ce", {"encoding": encoding(["age"] * 9)}, None, "expected each name once"),
    "a pattern": ("ce", {"encoding": encoding([], delimiter="(a+)+$")}, None, "delimiter: Value error, one character"),
    "no such network": ("ce", {"model": {"name": "mpl", "hidden": [1]}}, None, "unknown model 'mpl', did you mean"),
    "no such width": ("ce", {"model": {"name": "mlp", "hidden": ["a"]}}, None, "model.hidden: expected widths"),
    "no outputs": ("ce", {"model": {"name": "mlp", "outputs": -1}}, None, "model.outputs: Input should be greater"),
    "a single logit": ("ce", {"classes": ["a", "b", "c"], "model": {"name": "mlp", "hidden": [16], "outputs": 1}},
                       lambda w: {n: w[n][:1].clone() for n in ("net.layers.1.weight", "net.layers.1.bias")},
                       "expected a network of 3 classes, got one of 2"),
    "east's own class": ("ce", {"model": {"name": "custom", "target": "east.losses.MetricLoss"}}, None, "trust=true"),
    "a square scale": ("ce", {}, lambda w: {"std": w["std"][:, None].clone()}, "std: expected 9 numbers, got a tensor"),
    "a class twice": ("boosting", {}, lambda w: {"net.present": w["net.present"] * 0}, "present: expected ascending"),
    "another class": ("rf", {}, lambda w: {"net.present": w["net.present"] + 1}, "present: expected ascending"),
    "a member's scale": ("stack", {}, lambda w: {MEMBER + "std": w[MEMBER + "std"] * 0}, "std: expected no zeros"),
    "a member's shape": ("stack", {}, lambda w: {MEMBER + "mean": w[MEMBER + "mean"][:2].clone()}, "mean: expected 9"),
    "a member's weights": ("stack", {}, lambda w: {MEMBER + FIRST: w[MEMBER + FIRST].T.contiguous()}, "size mismatch"),
    "a class of a member": ("stack", {}, lambda w: {LAST: w[LAST] * 0}, "present: expected ascending"),
    "more members": ("stack", {"networks": 5}, None, "loading state_dict for MLP"),
    "no members": ("stack", {"networks": -1}, None, "networks: Input should be greater than or equal to 0"),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNFIT)
def test_an_inconsistent_model_is_refused_and_its_file_named(kind, models, tmp_path):
    loss, about, tensors, reason = UNFIT[kind]
    folder = edited(models / loss, tmp_path / "model", about, tensors)
    with pytest.raises(DataError) as refused:
        east.load(folder)
    file = "weights.safetensors" if tensors or kind in ("other widths", "more members") else "model.json"
    assert str(refused.value).startswith(f"{folder / file}: ")
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["model.json", "weights.safetensors"])
@pytest.mark.parametrize("content", [b"", b"{", b"\xff" * 100, b"[" * 10**5, b"null", (2**60).to_bytes(8, "little")])
def test_damaged_files_of_a_model_are_named(name, content, models, tmp_path):
    folder = edited(models / "ce", tmp_path / "model")
    (folder / name).write_bytes(content)
    with pytest.raises(DataError, match=re.escape(f"{folder / name}: ")):
        east.load(folder)


def altered(folder, change, name="classifier.skops"):
    """A saved classifier whose list of objects or arrays were changed: change(schema, arrays by file name)."""
    with ZipFile(folder / name) as archive:
        files = {entry: archive.read(entry) for entry in archive.namelist()}
    schema = json.loads(files.pop("schema.json"))
    arrays = {entry: np.load(io.BytesIO(content)) for entry, content in files.items()}
    change(schema, arrays)
    with ZipFile(folder / name, "w", ZIP_DEFLATED) as archive:
        archive.writestr("schema.json", json.dumps(schema))
        for entry, array in arrays.items():
            buffer = io.BytesIO()
            np.save(buffer, array)
            archive.writestr(entry, buffer.getvalue())
    return folder


def objects(node, loader):
    """The descriptions of all objects of one kind in a skops file."""
    if isinstance(node, dict):
        if node.get("__loader__") == loader:
            yield node
        node = list(node.values())
    if isinstance(node, list):
        for item in node:
            yield from objects(item, loader)


def first_tree(schema, arrays):
    """The state of the first tree of a forest or of boosting, and the name of the file of its nodes."""
    tree = next(objects(schema, "TreeNode"), None)
    if tree is None:
        tree = next(o for o in objects(schema, "ObjectNode") if o["__class__"] == "TreePredictor")
    return tree, tree["content"]["content"]["nodes"]["file"]


def in_nodes(field, value):
    def change(schema, arrays):
        name = first_tree(schema, arrays)[1]
        arrays[name] = arrays[name].copy()
        arrays[name][field][0] = value

    return change


def of_tree(**values):
    """Set numbers in the state of the first tree; `outputs` is the last argument of its constructor."""

    def change(schema, arrays):
        tree = first_tree(schema, arrays)[0]
        for name, value in values.items():
            node = tree["__reduce__"]["args"]["content"][2] if name == "outputs" else tree["content"]["content"][name]
            node |= {"content": str(value), "__id__": 10**6}

    return change


def another_class(schema, arrays):
    schema["__module__"], schema["__class__"] = "sklearn.ensemble._bagging", "BaggingClassifier"


def a_function(schema, arrays):
    schema["content"]["content"]["predict_proba"] = {
        "__class__": "system", "__module__": "os", "__loader__": "FunctionNode", "__id__": 10**6}  # fmt: skip


def one_number_for_two(schema, arrays):
    """Of two objects with one number, skops builds the first: here 10**9 in place of a 1."""
    first = next(objects(schema, "JsonNode"))
    first |= {"content": str(10**9), "__id__": 10**6}
    of_tree(outputs=1)(schema, arrays)


def an_array_read_again(schema, arrays):
    one, other = list(objects(schema, "TreeNode"))[:2]
    other["content"]["content"]["nodes"]["file"] = one["content"]["content"]["nodes"]["file"]


def a_bomb(schema, arrays):
    arrays["zeros.npy"] = np.zeros(10**7)


UNSOUND = {
    "a circle": ("rf", in_nodes("left_child", 0), "expected children after their parent"),
    "no such node": ("rf", in_nodes("right_child", 1_000_000), "expected children after their parent"),
    "no such feature": ("rf", in_nodes("feature", 99), "features from 0 to 8"),
    "a circle of boosting": ("boosting", in_nodes("right", 0), "expected children after their parent"),
    "no such node of boosting": ("boosting", in_nodes("left", 2**31), "expected children after their parent"),
    "no such feature of boosting": ("boosting", in_nodes("feature_idx", -1), "features from 0 to 8"),
    "a split on categories": ("boosting", in_nodes("is_categorical", 1), "expected children after their parent"),
    "fewer nodes than there are": ("rf", of_tree(node_count=1), "expected children after their parent"),
    "more outputs than there are": ("rf", of_tree(outputs=10**9), "expected trees of one output"),
    "another class": ("rf", another_class, "if you trust its author, use trust=true"),
    "a function": ("rf", a_function, "it holds a os.system, which is not checked"),
    "one number for two": ("rf", one_number_for_two, "expected trees of one output"),
    "an array read again": ("rf", an_array_read_again, "expected each array once"),
    "a bomb": ("rf", a_bomb, "expected a file that unpacks to at most 100 times its size"),
    "another protocol": ("rf", lambda schema, _: schema.update(protocol=0), "expected a file of skops protocol"),
}


@pytest.mark.parametrize("kind", UNSOUND)
def test_an_unsound_classifier_is_refused_before_any_row_passes_through_it(kind, models, tmp_path):
    loss, change, reason = UNSOUND[kind]
    folder = altered(edited(models / loss, tmp_path / "model"), change)
    with pytest.raises(DataError) as refused:
        east.load(folder)
    assert str(refused.value).startswith(f"{folder / 'classifier.skops'}: ")
    assert reason in str(refused.value)


def test_a_classifier_that_only_its_author_knows_needs_trust(models, tmp_path):
    model = east.load(models / "rf")
    rows = np.random.default_rng(0).normal(size=(50, 9))
    model.net.estimator = KNeighborsClassifier().fit(rows, rows[:, 0] > 0)
    folder = model.save(tmp_path / "model")
    with pytest.raises(DataError, match="KNeighborsClassifier, which is not checked; if you trust its author"):
        east.load(folder)
    assert set(east.load(folder, trust=True).predict(people())) <= {"low", "high"}


@pytest.mark.parametrize("name", ["model.json", "weights.safetensors"])
def test_the_digest_detects_a_changed_model(name, models, tmp_path):
    """A changed category name, or one bit of a weight: nothing but the digest would notice."""
    folder = shutil.copytree(models / "ce", tmp_path / "model")
    content = (folder / name).read_bytes()
    changed = content.replace(b"nurse", b"purse") if name == "model.json" else content[:-1] + bytes([content[-1] ^ 1])
    (folder / name).write_bytes(changed)
    with pytest.raises(DataError, match=r"model\.json: it or a file beside it has changed since it was written; if"):
        east.load(folder)
    about = json.loads((folder / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps({key: value for key, value in about.items() if key != "digest"}))
    assert len(east.load(folder).predict(people())) == len(people()), "whoever meant it says so"


def test_a_sound_model_passes_the_same_checks(models):
    for loss in ("ce", "rf", "boosting", "stack"):
        assert set(east.load(models / loss).predict(people())) <= {"low", "high"}


def test_probabilities_that_are_not_finite_raise_instead_of_giving_a_label(models):
    model = east.load(models / "ce")
    with torch.no_grad():
        model.net.layers[0].weight.fill_(torch.inf)
    with pytest.raises(DataError, match="row 1: the probabilities of this model are not finite or"):
        model.predict(people())


def test_the_code_of_a_strangers_network_runs_only_if_trusted(models, tmp_path, monkeypatch, east_run):
    """A module beside the model, in the working directory, is not imported, not even searched for."""
    (tmp_path / "evil_network.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nNet = None\n")
    folder = edited(models / "ce", tmp_path / "model", {"model": {"name": "custom", "target": "evil_network.Net"}})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        DataError,
        match=r"model.json: its network is the custom class 'evil_network.Net', and loading",
    ):
        east.load(folder)
    people().to_csv(tmp_path / "rows.csv", index=False)
    command = [
        "task=predict",
        f"checkpoint={folder}",
        f"input={tmp_path / 'rows.csv'}",
        f"output={tmp_path / 'out.csv'}",
    ]
    answer = east_run(*command)
    assert answer.code == cli.NO_DATA
    assert "if you trust its author, use trust=true" in answer.err
    assert not (tmp_path / "ran").exists()
    monkeypatch.setattr(sys, "path", [*sys.path])
    answer = east_run(*command, "trust=true")
    assert (tmp_path / "ran").exists(), "as it was asked for"
    assert "expected a subclass of torch.nn.Module" in answer.err, "and still it must be a network"


def test_our_own_classes_import_nothing_for_a_stranger(models, tmp_path, monkeypatch):
    """A loss is a torch.nn.Module too, and would import the metric that its parameters name."""
    (tmp_path / "evil_metric.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nf = len\n")
    monkeypatch.syspath_prepend(tmp_path)
    section = {"name": "custom", "target": "east.losses.MetricLoss", "parameters": {"metric": "evil_metric.f"}}
    folder = edited(models / "ce", tmp_path / "model", {"model": section})
    with pytest.raises(DataError, match="if you trust its author, use trust=true"):
        east.load(folder)
    assert not (tmp_path / "ran").exists()


def test_what_a_record_names_is_not_imported(tmp_path, monkeypatch):
    (tmp_path / "evil_metric.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    golden = next(r for r in records.scan(GOLDEN) if r.config.loss.options.get("metric"))
    loss = golden.config.loss.model_copy(update={"metric": "evil_metric.f", "name": "metric"})
    records.write(tmp_path / "results", golden.but(config=golden.config.but(loss=loss), stage="trial"))
    rendered("grid", tmp_path / "results")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("dry", ["true", "false"])
@pytest.mark.parametrize("target", ["subprocess.Popen", "os.system", "east.losses.inputs"])
def test_a_target_of_another_kind_is_refused_before_it_is_called(target, dry, tmp_path, east_run):
    (tmp_path / "conf" / "loss").mkdir(parents=True)
    ran = tmp_path / "ran"
    text = f"{{name: mine, _target_: {target}, args: [touch, {ran}]}}"
    (tmp_path / "conf" / "loss" / "mine.yaml").write_text(text)
    answer = east_run(*TINY, "loss=mine", f"config_dir={tmp_path / 'conf'}", f"dry_run={dry}")
    assert answer.code == cli.BAD_CONFIG
    assert f"loss._target_={target}: expected a class of east.losses.Loss, got" in answer.err
    small = [word for word in TINY if not word.startswith("model")]
    answer = east_run(*small, "model=custom", f"model.target={target}", f"dry_run={dry}")
    assert answer.code == cli.BAD_CONFIG
    assert f"model.target={target}: expected a subclass of torch.nn.Module" in answer.err
    assert not ran.exists()


@pytest.mark.parametrize("metric", ["os.system", "subprocess.Popen", "os.path"])
def test_a_metric_of_another_kind_is_refused_before_it_is_called(metric, east_run, monkeypatch):
    called = []
    monkeypatch.setattr("subprocess.Popen.__init__", lambda *given, **_: called.append(given))
    answer = east_run(*TINY, "loss=metric", f"loss.metric={metric}", "dry_run=true")
    assert answer.code == cli.BAD_CONFIG
    assert f"metric '{metric}': expected a function of a Confusion, got <" in answer.err
    assert not called


def test_names_never_become_paths(tmp_path, east_run):
    (tmp_path / "conf" / "loss").mkdir(parents=True)
    for name in ("mine", "my loss"):
        file = tmp_path / "conf" / "loss" / f"{name}.yaml"
        file.write_text(f"{{name: {name.replace('mine', '../../mine')}, _target_: east.losses.CrossEntropy}}")
    answer = east_run(*TINY, "loss=mine", f"config_dir={tmp_path / 'conf'}")
    assert answer.code == cli.BAD_CONFIG
    assert "expected name: mine, as the file is called, got '../../mine'" in answer.err
    answer = east_run(*TINY, "loss=my loss", f"config_dir={tmp_path / 'conf'}")
    assert answer.code == cli.BAD_CONFIG
    assert "expected a plain name of letters, digits, '_', '-' and '.', got 'my loss'" in answer.err
    assert not list(tmp_path.parent.glob("mine*"))


def test_spreadsheet_formulas_are_neutralised_on_request(tmp_path, east_run, models):
    folder = edited(models / "ce", tmp_path / "model", {"classes": ["=HYPERLINK(1)", "+high"]})
    people().to_csv(tmp_path / "rows.csv", index=False)
    command = ["task=predict", f"checkpoint={folder}", f"input={tmp_path / 'rows.csv'}"]
    assert east_run(*command, f"output={tmp_path / 'out.csv'}").code == cli.DONE
    assert east_run(*command, f"output={tmp_path / 'safe.csv'}", "safe_csv=true").code == cli.DONE
    plain, safe = (pd.read_csv(tmp_path / name) for name in ("out.csv", "safe.csv"))
    assert set(plain["label"]) <= {"=HYPERLINK(1)", "+high"}
    assert (safe["label"] == "'" + plain["label"]).all()
    assert (safe.iloc[:, 1:].to_numpy() == plain.iloc[:, 1:].to_numpy()).all()


def test_predictions_are_not_written_over_their_input(tmp_path, east_run, models):
    people().to_csv(tmp_path / "rows.csv", index=False)
    before = (tmp_path / "rows.csv").read_bytes()
    (tmp_path / "same.csv").symlink_to(tmp_path / "rows.csv")
    for name in ("rows.csv", "same.csv"):
        command = [f"checkpoint={models / 'ce'}", f"input={tmp_path / 'rows.csv'}", f"output={tmp_path / name}"]
        answer = east_run("task=predict", *command, "force=true")
        assert answer.code == cli.BAD_CONFIG
        assert "is the input itself; write the predictions to another file" in answer.err
    assert (tmp_path / "rows.csv").read_bytes() == before


@pytest.mark.parametrize("count", [60, pytest.param(1_000, marks=pytest.mark.nightly)])
def test_no_random_damage_to_a_model_crashes_or_changes_a_number(count, models, tmp_path):
    """With random bytes changed, a model is refused by name or predicts as before."""
    dice, rows = random.Random(0), people(20)
    true = {loss: east.load(models / loss).predict_proba(rows) for loss in ("ce", "rf")}
    for number in range(count):
        loss = dice.choice(["ce", "rf"])
        folder = shutil.copytree(models / loss, tmp_path / str(number))
        file = dice.choice(sorted(folder.iterdir()))
        file.write_bytes(mutated(file.read_bytes(), dice))
        with contextlib.suppress(DataError):
            np.testing.assert_array_equal(east.load(folder).predict_proba(rows), true[loss])


ODD = [None, True, 0, -1, 7, 10**20, 0.5, 1e308, np.nan, "", "x", "../..", "date", "dropped", "darknet19", "gnn"]
ODD += ["image", [], {}, [[]], [1, 2], ["a", "b"], [3, 8, 8], {"threshold": 0.5}, {"scale": [1, 2], "shift": [0, 1]}]


def places(value, above=()):
    """The path of every value inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        yield (*above, name)
        yield from places(item, (*above, name))


def distorted_json(values, dice):
    """JSON with one value removed or replaced by something odd."""
    values = json.loads(json.dumps(values))
    *above, name = dice.choice([*places(values)])
    inside = reduce(getitem, above, values)
    if dice.randrange(4):
        inside[name] = dice.choice(ODD)
    else:
        del inside[name]
    return values


def distorted_tensors(tensors, dice):
    """Tensors, one of them with another shape, type or value."""
    name = dice.choice(sorted(tensors))
    old = tensors[name]
    extreme = [0, -1, 7, *([1e30, np.nan, np.inf] if old.is_floating_point() else [10**9])]
    changes = [
        lambda: old.flatten(),
        lambda: old.unsqueeze(-1),
        lambda: old[:0],
        lambda: torch.cat((old, old)),
        lambda: old.to(dice.choice([torch.float64, torch.float16, torch.int64, torch.bool])),
        lambda: old.index_fill(0, torch.tensor([dice.randrange(len(old))]), dice.choice(extreme)),
        lambda: old * dice.choice([0, -1, 2]),
    ]
    return {**tensors, name: dice.choice(changes)().contiguous()}


def distorted_object(schema, arrays, dice):
    """A classifier with a number of its description or of an array replaced by something odd."""
    if dice.randrange(2):
        name = dice.choice(sorted(name for name, array in arrays.items() if array.size))
        content = bytearray(arrays[name].tobytes())
        position = dice.randrange(len(content))
        content[position] = dice.randrange(256)
        arrays[name] = np.frombuffer(bytes(content), arrays[name].dtype).reshape(arrays[name].shape)
    else:
        node = dice.choice(list(objects(schema, "JsonNode")))
        node |= {"content": json.dumps(dice.choice(ODD)), "__id__": 10**6}


@pytest.mark.parametrize("count", [60, pytest.param(1_000, marks=pytest.mark.nightly)])
def test_no_invented_model_crashes(count, models, tmp_path):
    """Valid files with senseless values are refused by name, or give probabilities for every row."""
    dice, rows = random.Random(0), people(20)
    for number in range(count):
        loss = dice.choice(["ce", "rf", "boosting", "stack"])
        folder = edited(models / loss, tmp_path / str(number))
        about, tensors = json.loads((folder / "model.json").read_text()), load_file(folder / "weights.safetensors")
        shown = {name: value for name, value in about.items() if name not in ("config", "versions")}
        if number % 3 == 0:
            (folder / "model.json").write_text(json.dumps(distorted_json(shown, dice)))
        elif number % 3 == 1 or loss == "ce":
            save_file(distorted_tensors(tensors, dice), folder / "weights.safetensors")
        else:
            altered(folder, lambda schema, arrays: distorted_object(schema, arrays, dice))
        with contextlib.suppress(DataError):
            model = east.load(folder)
            p = model.predict_proba(rows)
            assert p.shape == (len(rows), len(model.classes))
            np.testing.assert_allclose(p.sum(1), 1, atol=1e-3)
            assert len(model.predict(rows)) == len(rows)
