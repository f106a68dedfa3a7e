"""Saved models give the same probabilities from raw rows as in training, and their files hold only data."""

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from sklearn.ensemble import RandomForestClassifier
from torch import nn

import east
from east import decisions
from east.choices import ConfigError
from east.lab import data, files
from east.lab.data import DataError, images
from east.lab.settings.settings import EnsembleSection
from east.lab.tasks import evaluate, predict
from east.lab.training import classical, ensemble, saved
from east.lab.training.engine import train
from east.lab.training.population import Trial
from tests.made import science

CLASSICAL = {
    "rf": ("RandomForest", {"n_estimators": 7}),
    "logistic": ("LogisticRegression", {}),
    "boosting": ("GradientBoosting", {"iterations": [3, 9]}),
    "ccs": ("CCS", {}),
    "nearest": ("Estimator", {"target": "sklearn.neighbors.KNeighborsClassifier"}),
}
LOSSES = {"ce": {"name": "ce", "_target_": "east.losses.CrossEntropy"}}
for name, (target, options) in CLASSICAL.items():
    LOSSES[name] = {"name": name, "_target_": f"east.baselines.{target}", "trains": "classical", **options}
STACK = EnsembleSection(name="stack", folds=2, components=("networks", "rf", "boosting", "logistic"))


def trained(loaded, loss="ce", model=None):
    """A model, the outcome it was made from, and the split."""
    made = science(
        model=model or {"name": "mlp", "hidden": [16]},
        loss=LOSSES.get(loss, LOSSES["ce"]),
        protocol={"name": "east", "patience": 3, "max_epochs": 3},
        hyper={"lr": 0.01, "batch_size": 32, "dropout": 0.0, "weight_decay": 0.0},
    )
    splits = data.split(loaded, stratify=True)
    if loss == "stack":
        made = made.but(ensemble=STACK, protocol=made.protocol.but(max_epochs=60, patience=20))
        outcome = ensemble.fit(Trial(made, 3), splits)
    elif made.loss.classical:
        outcome = classical.fit(Trial(made, 3), splits)
    else:
        outcome = train([Trial(made, 3)], splits, device="cpu", progress=False)[0]
    return saved.from_outcome(outcome, loaded, splits), outcome, splits


def people(rows=200):
    random = np.random.default_rng(0)
    ages = random.normal(40, 10, rows).round(1)
    jobs = {"job": random.choice(["clerk", "nurse", "smith"], rows), "postcode": random.integers(1, 4, rows)}
    frame = pd.DataFrame({"age": ages} | jobs)
    frame["income"] = np.where(frame["age"] + 5 * random.normal(size=rows) > 45, "high", "low")
    frame.loc[::9, "age"] = np.nan
    frame.loc[::11, "job"] = np.nan
    return frame


@pytest.fixture(scope="module")
def frame():
    return people()


@pytest.fixture(scope="module")
def table(frame, tmp_path_factory):
    path = tmp_path_factory.mktemp("table") / "people.csv"
    frame.to_csv(path, index=False)
    return data.load("csv", path=str(path), target="income", categorical=["postcode"])


@pytest.fixture(scope="module")
def stored(table, tmp_path_factory):
    model, outcome, splits = trained(table)
    return model.save(tmp_path_factory.mktemp("models") / "people"), outcome, splits


def test_a_model_replaces_one_that_another_process_saves_at_the_same_time(stored, tmp_path, monkeypatch):
    model, folder, rename, others = saved.load(stored[0]), tmp_path / "model", Path.rename, iter([True])

    def interrupted(self, target):
        if Path(target) == folder and next(others, False):
            shutil.copytree(stored[0], folder)  # another process is faster
        return rename(self, target)

    model.save(folder)
    (folder / "stray").write_text("")
    monkeypatch.setattr(Path, "rename", interrupted)
    model.save(folder)
    assert repr(saved.load(folder)) == repr(model) == "Model(MLP of 2 classes: low, high)"
    assert [path.relative_to(tmp_path).parts for path in sorted(tmp_path.rglob("*"))] == [
        ("model",), ("model", "model.json"), ("model", "weights.safetensors")
    ], "nothing is left behind"  # fmt: skip


def test_a_model_that_cannot_be_replaced_stays(stored, tmp_path, monkeypatch):
    model, folder, rename = saved.load(stored[0]), tmp_path / "model", Path.rename
    model.save(folder)

    def refused(self, target):
        if Path(target) == folder and (self / "new").exists():
            raise PermissionError("no")
        return rename(self, target)

    finished = tmp_path / "finished"
    finished.mkdir()
    (finished / "new").touch()
    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(PermissionError):
        files.replace_folder(finished, folder)
    assert repr(saved.load(folder)) == repr(model)


def predicted(model, source, **options):
    """The predictions that are written for a file or folder."""
    target = source.parent / "out.csv"
    predict.predict_file(model, source, target, **options)
    return pd.read_csv(target, dtype=options and str, keep_default_na=not options)


@pytest.mark.parametrize("loss", LOSSES)
def test_raw_rows_give_the_probabilities_of_training(loss, frame, table, tmp_path):
    model, outcome, splits = trained(table, loss=loss)
    again = east.load(model.save(tmp_path / "model"), trust=loss == "nearest")
    rows = splits.test.index.numpy()
    np.testing.assert_allclose(again.predict_proba(frame.iloc[rows]), outcome.probabilities["test"], atol=1e-6)
    assert set(again.predict(frame)) == {"low", "high"}


@pytest.mark.parametrize("loss", ["ce", "rf"])
def test_seconds_since_1970_give_the_probabilities_of_training(loss, frame, tmp_path):
    rows = frame[["income"]].assign(seen=1.7e9 + frame["age"].fillna(40))
    rows.to_csv(tmp_path / "people.csv", index=False)
    model, outcome, splits = trained(data.load("csv", path=str(tmp_path / "people.csv"), target="income"), loss=loss)
    again = east.load(model.save(tmp_path / "model"))
    test = rows.iloc[splits.test.index]
    predicted = again.predict_proba(test)
    np.testing.assert_allclose(predicted, outcome.probabilities["test"], atol=1e-6)
    np.testing.assert_array_equal(again.predict_proba(test[["seen"]].to_numpy()), predicted)
    assert len(np.unique(predicted, axis=0)) > 3


def test_columns_may_have_any_order_with_others_among_them_and_no_target(frame, stored):
    model = east.load(stored[0])
    shuffled = frame.drop(columns="income")[["postcode", "job", "age"]].assign(note="x")
    np.testing.assert_array_equal(model.predict_proba(shuffled), model.predict_proba(frame))


def test_the_files_are_json_and_safetensors(stored):
    folder, outcome, _ = stored
    assert sorted(path.name for path in folder.iterdir()) == ["model.json", "weights.safetensors"]
    about = json.loads((folder / "model.json").read_text())
    assert about["classes"] == ["low", "high"]
    assert about["encoding"]["target"] == "income"
    assert about["seed"] == 3
    stored = load_file(folder / "weights.safetensors")
    torch.testing.assert_close(stored["net.layers.0.weight"], outcome.weights["layers.0.weight"])


def test_a_decision_rule_is_kept(frame, stored, tmp_path):
    plain = east.load(stored[0])
    strict = east.load(plain.deciding("plug-in for f1_pos", decisions.Threshold(0.9)).save(tmp_path / "strict"))
    p = plain.predict_proba(frame)[:, 1]
    np.testing.assert_array_equal(plain.predict(frame) == "high", p > 0.5)
    np.testing.assert_array_equal(strict.predict(frame) == "high", p >= 0.9)
    np.testing.assert_array_equal(strict.predict_proba(frame), plain.predict_proba(frame))


def test_a_model_of_many_classes_predicts_from_arrays(tmp_path):
    digits = data.load("digits", limit=300)
    model, outcome, splits = trained(digits)
    again = east.load(model.save(tmp_path / "digits"))
    rows = digits.features[splits.test.index]
    np.testing.assert_allclose(again.predict_proba(rows), outcome.probabilities["test"], atol=1e-6)
    weights = decisions.Affine((*[1.0] * 9, 1e9))
    assert set(again.deciding("always nine", weights).predict(rows)) == {"9"}
    named = pd.DataFrame(rows.numpy(), columns=digits.columns)
    np.testing.assert_array_equal(again.predict_proba(named), again.predict_proba(rows))
    with pytest.raises(DataError, match=r"expected rows of shape \[64\], got an array of shape \[5, 3\]"):
        again.predict(np.zeros((5, 3)))
    with pytest.raises(DataError, match="finite"):
        again.predict(np.full((1, 64), np.nan))


def bright(folder, **files):
    """Images of two classes that differ in brightness; and such files, by name and brightness."""
    from PIL import Image

    for name, value in files.items():
        path = folder / f"{name.replace('_', '/')}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (value,) * 3).save(path)
    labels = torch.arange(60) % 2
    pixels = torch.randint(0, 55, (60, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    pixels += 200 * labels.to(torch.uint8)[:, None, None, None]
    return data.Images(pixels=pixels, labels=labels, classes=("dark", "light"), name="toy", positive=1)


@pytest.mark.parametrize("loss", ["ce", "rf", "logistic"])
def test_a_model_of_images_predicts_as_in_training(loss, tmp_path):
    images = bright(tmp_path)
    model, outcome, splits = trained(images, loss=loss)
    again = east.load(model.save(tmp_path / "model"))
    found = again.predict_proba(images.pixels[splits.test.index].numpy())
    np.testing.assert_allclose(found, outcome.probabilities["test"], atol=1e-5)
    with pytest.raises(DataError, match="uint8"):
        again.predict(images.pixels.float())


def test_a_folder_of_images_becomes_a_file_of_labels(tmp_path):
    model = trained(bright(tmp_path / "new", a=0, sub_b=200))[0]
    written = predicted(model, tmp_path / "new")
    assert written["file"].tolist() == ["a.png", "sub/b.png"]
    assert written["p_light"].diff().iloc[1] > 0.2
    with pytest.raises(DataError, match="expected input=FOLDER"):
        predict.predict_file(model, tmp_path / "out.csv", tmp_path / "x.csv")


def test_kept_columns_have_names_of_their_own():
    predicted = pd.DataFrame({"label": ["no"], "p_no": [0.9], "p_yes": [0.1]})
    rows = pd.DataFrame({"label": [1], "input_label": [2], "age": [3]})
    output = ["label", "p_no", "p_yes"]
    assert list(predict.with_columns(predicted, rows, "all")) == ["input_input_label", "input_label", "age", *output]
    assert list(predict.with_columns(predicted, rows, ["age", "label", "age"])) == ["age", "input_label", *output]


def test_labelled_images_pass_through_a_few_at_a_time(tmp_path, monkeypatch):
    model = trained(bright(tmp_path, dark_a=0, light_b=200, light_c=200))[0]
    sizes, decode = [], images.decode
    monkeypatch.setattr(predict, "IMAGES", 2)
    monkeypatch.setattr(images, "decode", lambda paths, *rest: (sizes.append(len(paths)), decode(paths, *rest))[1])
    labelled = evaluate.labelled_images(model, tmp_path)
    assert sizes == [2, 1]
    assert labelled.labels.tolist() == [0, 1, 1]
    assert labelled.frame["file"].tolist() == ["dark/a.png", "light/b.png", "light/c.png"]
    assert (np.diff(labelled.probabilities[:, 1]) * [1, 0] >= 0).all()
    (tmp_path / "light").rename(tmp_path / "lamp")
    with pytest.raises(DataError, match="does not know the class 'lamp'"):
        evaluate.labelled_images(model, tmp_path)
    assert len(sizes) == 2, "nothing was decoded in vain"


class Net(nn.Module):
    def __init__(self, inputs_shape, outputs):
        super().__init__()
        self.layer = nn.Linear(*inputs_shape, outputs)

    def forward(self, inputs):
        return self.layer(inputs)


def make_net(inputs_shape, outputs):
    return Net(inputs_shape, outputs)


def test_your_own_network_can_be_saved_and_loaded(frame, table, tmp_path):
    model, outcome, splits = trained(table, model={"name": "custom", "target": f"{__name__}.Net"})
    again = east.load(model.save(tmp_path / "own"), trust=True)
    found = again.predict_proba(frame.iloc[splits.test.index.numpy()])
    np.testing.assert_allclose(found, outcome.probabilities["test"], atol=1e-6)


@pytest.mark.parametrize("target", ["os.system", f"{__name__}.make_net", "torch.nn.Missing"])
def test_a_saved_model_may_name_only_a_class_of_networks(target, stored, tmp_path):
    model = east.load(stored[0])
    about = {**model.about.model_dump(), "model": {"name": "custom", "target": target}}
    (tmp_path / "model.json").write_text(json.dumps(about))
    shutil.copy(stored[0] / "weights.safetensors", tmp_path)
    with pytest.raises(DataError, match=r"expected a subclass of torch\.nn\.Module"):
        east.load(tmp_path, trust=True)


def test_a_forest_takes_little_space():
    """A node takes at most 25 bytes: two forests of 300 trees on 20,000 noisy rows (3.5 million nodes) take 70 MB."""
    rows = np.random.default_rng(0)
    inputs, labels = rows.normal(size=(5_000, 20)).astype(np.float32), rows.integers(2, size=5_000)
    forest = RandomForestClassifier(3, random_state=0).fit(inputs, labels)
    nodes = sum(tree.tree_.node_count for tree in forest.estimators_)
    assert len(saved.dumped(forest)) < 25 * nodes


def test_an_ensemble_is_one_folder_that_predicts_and_evaluates(frame, tmp_path, east_run):
    frame.to_csv(tmp_path / "people.csv", index=False)
    words = [f"dataset.path={tmp_path}/people.csv", "dataset.target=income", "preset=quick", "loss=ce", "device=cpu"]
    components = "[networks,extratrees,boosting,logistic]"
    words += ["ensemble=stack", "ensemble.folds=2", f"ensemble.components={components}", "save_model=true", "trials=1"]
    answer = east_run(*words, f"results_dir={tmp_path}/out", "protocol.max_epochs=3")
    assert answer.code == 0, answer.err
    (folder,) = (tmp_path / "out" / "models").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["classifier.skops", "model.json", "weights.safetensors"]
    files = [f"checkpoint={folder}", f"input={tmp_path}/people.csv"]
    assert east_run("task=predict", *files, f"output={tmp_path}/new.csv").code == 0
    p = pd.read_csv(tmp_path / "new.csv")[["p_high", "p_low"]]
    np.testing.assert_allclose(p, east.load(folder).predict_proba(frame)[:, ::-1], atol=1e-6)
    answer = east_run("task=evaluate", *files, f"results_dir={tmp_path}/out")
    assert answer.code == 0, answer.err
    assert "confusion matrix of 200 rows" in answer.out
    assert f"{STACK.name}" in json.loads((folder / "model.json").read_text())["config"]["ensemble"]["name"]


def test_a_stack_predicts_the_same_when_it_is_loaded(frame, table, tmp_path):
    model, outcome, splits = trained(table, loss="stack")
    again = east.load(model.save(tmp_path / "stack"))
    assert again.about.networks == len(again.net.networks) == 4
    rows = frame.iloc[splits.test.index.numpy()]
    np.testing.assert_allclose(again.predict_proba(rows), outcome.probabilities["test"], atol=1e-5)
    with pytest.raises(ConfigError, match=r"your own.*, got .*HistGradientBoosting"):
        east.export(again, tmp_path / "stack.onnx")


def test_files_are_predicted_in_chunks(frame, stored, tmp_path, monkeypatch):
    model = east.load(stored[0])
    whole = model.predict_proba(frame)
    for rows, name in ((7, "new.csv"), (1000, "new.csv.gz")):
        monkeypatch.setattr(predict, "FILE_ROWS", rows)
        frame.to_csv(tmp_path / name, index=False)
        assert predict.predict_file(model, tmp_path / name, tmp_path / "deep" / "out.csv") == len(frame)
        written = pd.read_csv(tmp_path / "deep" / "out.csv")
        assert list(written) == ["label", "p_low", "p_high"]
        np.testing.assert_allclose(written[["p_low", "p_high"]], whole, atol=1e-6)
        assert written["label"].tolist() == model.predict(frame).tolist()


def test_new_files_are_read_with_the_delimiter_of_training(frame, tmp_path):
    path = tmp_path / "people.txt"
    frame.to_csv(path, index=False, sep=" ", na_rep="?")
    loaded = data.load("csv", path=str(path), target="income", categorical=["postcode"], delimiter=" ")
    model = east.load(trained(loaded)[0].save(tmp_path / "model"))
    assert predicted(model, path)["label"].tolist() == model.predict(frame).tolist()


@pytest.mark.parametrize("format", ["csv", "parquet", "xlsx"])
def test_kept_columns_are_copied_as_they_are_written(frame, stored, tmp_path, monkeypatch, format):
    monkeypatch.setattr(predict, "FILE_ROWS", 3)
    ids, new = ["00012", "1E5", "NA", "7", "TRUE", "1.50", "a, b"], tmp_path / f"new.{format}"
    numbers = pd.array([1, None, 3, 4, 5, 6, -7], dtype="Int64")
    rows = frame[:7].assign(id=ids, number=numbers, postcode=1)
    if format == "csv":
        rows.to_csv(new, index=False)
    else:
        pytest.importorskip("openpyxl" if format == "xlsx" else "pyarrow")
        rows.to_parquet(new) if format == "parquet" else rows.to_excel(new, index=False)
    written = predicted(east.load(stored[0]), new, keep=["id", "number"], safe=True)
    assert written["id"].tolist() == ids
    assert written["number"].tolist() == ["1", "", "3", "4", "5", "6", "-7"]


def test_new_files_are_read_in_the_notation_of_training(frame, tmp_path):
    """1,500 and 48.253 alone do not show it."""
    shares = [f"{k % 7},{k:03}" for k in range(len(frame))]
    rows = frame[["job", "income"]].assign(share=shares, amount=[f"{1 + k % 90}.253" for k in range(len(frame))])
    path, new = tmp_path / "people.csv", tmp_path / "new.csv"
    rows.to_csv(path, index=False, sep=";")
    model = trained(data.load("csv", path=str(path), target="income"))[0]
    numbers = {"share": [float(share.replace(",", ".")) for share in shares]}
    numbers["amount"] = [253 + 1000 * (1 + k % 90) for k in range(len(frame))]
    expected = model.predict_proba(rows.assign(**numbers))
    np.testing.assert_array_equal(model.predict_proba(rows), expected)
    clear = rows["share"].str.startswith("0")
    rows[~clear].to_csv(new, index=False, sep=";")
    np.testing.assert_allclose(predicted(model, new)[["p_low", "p_high"]], expected[~clear], atol=1e-6)


@pytest.mark.parametrize("format", ["csv", "xlsx"])
@pytest.mark.parametrize("words", [["01", "02", "A1"], ["TRUE", "FALSE", "unknown"], ["1.0", "2.0", "3+"]])
def test_words_that_look_like_numbers_stay_words_in_new_files(frame, tmp_path, monkeypatch, format, words):
    """Every portion of the new file has one word only; a second column of TRUE and FALSE is categorical by request."""
    pytest.importorskip("openpyxl")
    codes = np.resize(words, len(frame))
    rows = frame.assign(age=range(len(frame)), code=codes, flag=np.resize(["TRUE", "FALSE", ""], len(frame)))
    path, new = tmp_path / "people.csv", tmp_path / f"new.{format}"
    rows.to_csv(path, index=False)
    table = data.load("csv", path=str(path), target="income", categorical=["postcode", "flag"])
    model = trained(table)[0]
    expected = model.predict_proba(rows.assign(flag=np.resize([True, False, None], len(frame))))
    grouped = rows.assign(expected=expected[:, 1]).sort_values("code", kind="stable")
    monkeypatch.setattr(predict, "FILE_ROWS", 25)
    grouped[:60].to_csv(new, index=False) if format == "csv" else grouped[:60].to_excel(new, index=False)
    np.testing.assert_allclose(predicted(model, new)["p_high"], grouped["expected"][:60], atol=1e-6)


def with_old_age(frame):
    return frame.astype({"age": object}).assign(age=[*[1.0] * 160, "old", *[1.0] * 39])


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda f: f.drop(columns=["age", "job"]), "columns are missing: age, job"),
        (lambda f: f.assign(age="old"), "age .expected numbers, got"),
        (lambda f: f.assign(job=7), "job .expected text such as 'clerk', got numbers such as '7'"),
        (lambda f: f.iloc[:0], "has no rows"),
        (with_old_age, "rows 151 to 200: columns do not fit those of training: age"),
    ],
)
def test_files_that_do_not_fit_are_refused_by_column_and_leave_no_file(
    change, message, frame, stored, tmp_path, monkeypatch
):
    monkeypatch.setattr(predict, "FILE_ROWS", 50)
    change(frame).to_csv(tmp_path / "new.csv", index=False)
    with pytest.raises(DataError, match=message):
        predict.predict_file(east.load(stored[0]), tmp_path / "new.csv", tmp_path / "out.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["new.csv"]


def test_an_array_with_words_is_refused_with_advice(frame, stored):
    model, words = east.load(stored[0]), frame.drop(columns="income").to_numpy()
    for rows in (words, words.astype(str), words.tolist()):
        with pytest.raises(DataError, match=r"expected numbers, got .*: pass a DataFrame with the columns of training"):
            model.predict_proba(rows)


@pytest.mark.parametrize("name", ["q.parquet", "q.xlsx", "q.csv.gz", "q.tsv"])
def test_predictions_are_not_written_under_the_name_of_another_format(frame, stored, tmp_path, name):
    frame.to_csv(tmp_path / "new.csv", index=False)
    with pytest.raises(ConfigError, match=f"{name}: predictions are written as CSV; expected .* ends in .csv or .txt"):
        predict.predict_file(east.load(stored[0]), tmp_path / "new.csv", tmp_path / name)
    assert not (tmp_path / name).exists()


def test_a_folder_without_a_valid_model_is_refused(stored, tmp_path):
    with pytest.raises(DataError, match=r"is not a saved model: expected a folder with model\.json"):
        east.load(tmp_path / "nothing")
    (tmp_path / "model.json").write_text(json.dumps({"format": 99}))
    save_file({}, tmp_path / "weights.safetensors")
    with pytest.raises(DataError, match=r"model\.json: format: Input should be 1"):
        east.load(tmp_path)
