"""ONNX files: with the JSON beside them, onnxruntime computes what the model predicts."""

import json
import re
import stat

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_iris

import east
from east import EASTClassifier, decisions
from east.choices import ConfigError
from east.lab import data, models
from east.lab.data.common import Images
from east.lab.settings.settings import ModelSection
from east.lab.training import saved
from east.lab.training.engine import train
from east.lab.training.export import beside, onnx_bytes
from east.lab.training.population import Trial
from tests.commands import ROOT
from tests.made import science
from tests.test_estimator import people

onnxruntime = pytest.importorskip("onnxruntime")


def decided(rule, positive, p):
    """The decision in NumPy, as a program without east would make it."""
    if rule is None:
        return p.argmax(-1)
    if "threshold" in rule:
        return np.where(p[:, positive] >= rule["threshold"], positive, 1 - positive)
    return (p * rule["scale"] + rule["shift"]).argmax(-1)


def run(path, features):
    """Probabilities and classes, from only the features and the two files."""
    about = json.loads(beside(path).read_text())
    scaling = about["scaling"]
    mean, std = (np.array(scaling[name]) for name in ("mean", "std"))
    if about["kind"] == "image":
        mean, std = mean[:, None, None], std[:, None, None]
    inputs = ((features / scaling["divisor"] - mean) / std).astype(np.float32)
    session = onnxruntime.InferenceSession(path.parent / about["network"])
    logits, p = session.run(["logits", "probabilities"], {about["input"]["name"]: inputs})
    np.testing.assert_allclose(torch.from_numpy(logits).softmax(-1), p, atol=1e-6)
    classes = np.array(about["classes"], dtype=object)
    return p, classes[decided(about["rule"], about["positive"], p.astype(float))]


def by_hand(row, columns):
    """The features of one row, as described by the JSON file's encoding."""
    features = []
    for column in columns:
        value, missing = row[column["name"]], pd.isna(row[column["name"]])
        if column["kind"] == "numeric":
            features += [column["median"] if missing else float(value), *([float(missing)] * column["indicator"])]
        elif column["kind"] == "categorical":
            word = "(missing)" if missing else str(value)
            features += [float(word == category) for category in column["categories"]]
    return features


def test_an_exported_classifier_predicts_the_same_from_encoded_rows(tmp_path):
    frame, y = people()
    frame = frame.drop(columns="seen")
    frame.loc[::7, "age"] = np.nan
    model = EASTClassifier(members=3, missing="median", decision="plugin", max_epochs=4, random_state=0, device="cpu")
    path = east.export(model.fit(frame, y), tmp_path / "new" / "people.onnx")
    encoding = json.loads(beside(path).read_text())["encoding"]
    features = np.array([by_hand(row, encoding["columns"]) for _, row in frame.iterrows()])
    p, classes = run(path, features)
    np.testing.assert_allclose(p, model.predict_proba(frame), atol=1e-5)
    np.testing.assert_array_equal(classes, model.predict(frame))
    for rows in (1, 5):  # any number of rows
        np.testing.assert_allclose(run(path, features[:rows])[0], p[:rows], atol=1e-6)
    with pytest.raises(ConfigError, match=r"expected a file that ends in \.onnx, got 'people\.pt'"):
        east.export(model, "people.pt")


def test_the_program_of_the_guide_predicts_the_same(tmp_path, monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "own_data.md").read_text(encoding="utf-8"), re.DOTALL)
    X, y = load_iris(return_X_y=True)
    frame = pd.DataFrame(X[:, :3], columns=["a", "b", "c"])
    X = frame.to_numpy()
    model = EASTClassifier(members=3, decision="argmax", max_epochs=4, random_state=0, device="cpu").fit(X, y)
    east.export(model, tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    space = {"frame": frame}
    exec(next(block for block in blocks if "onnxruntime" in block), space)
    np.testing.assert_allclose(space["probabilities"], model.predict_proba(X), atol=1e-5)
    assert space["names"] == [str(label) for label in model.predict(X)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [ModelSection(name="tiny_darknet", width=0.25), ModelSection(name="mlp", hidden=[8], outputs=1)]
)
def test_exported_image_models_predict_the_same(model, tmp_path, east_run):
    """A Darknet, and a perceptron on pixels with a single logit, exported by the command."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(40) % 2
    pixels = (torch.rand(40, 3, 16, 16, generator=generator) * 200 + 50 * labels[:, None, None, None]).byte()
    loaded = Images(labels=labels, classes=("dark", "light"), name="made", positive=1, pixels=pixels)
    splits = data.split(loaded)
    config = science(model=model, hyper={"lr": 0.01, "batch_size": 8, "dropout": 0.1, "weight_decay": 0.0})
    outcome = train([Trial(config, 0)], splits, device="cpu", progress=False)[0]
    stored = saved.from_outcome(outcome, loaded, splits)
    folder = stored.deciding("plug-in for f1_pos", decisions.Threshold(0.4)).save(tmp_path / "model")
    answer = east_run("task=export", f"checkpoint={folder}", f"output={tmp_path}/net.onnx")
    assert answer.code == 0, answer.err
    assert answer.out == f"exported: {tmp_path}/net.onnx and {tmp_path}/net.onnx.json\n"
    p, classes = run(tmp_path / "net.onnx", pixels.numpy())
    again = east.load(folder)
    np.testing.assert_allclose(p, again.predict_proba(pixels), atol=1e-5)
    np.testing.assert_array_equal(classes, again.predict(pixels))


def test_an_exported_darknet19_predicts_the_same():
    """Narrow, with random weights and statistics of some batches; onnxruntime takes any number of images."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(12, 3, 32, 32, generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = models.build(ModelSection(name="darknet19", width=1 / 16), (3, 32, 32), 5)
        net(images)
    session = onnxruntime.InferenceSession(onnx_bytes(net, [3, 32, 32]))
    net.eval()
    for some in (images, images[:1]):
        logits, p = session.run(["logits", "probabilities"], {"inputs": some.numpy()})
        expected = net(some).detach()
        np.testing.assert_allclose(logits, expected, atol=1e-5)
        np.testing.assert_allclose(p, expected.softmax(-1), atol=1e-5)


def test_models_that_cannot_be_exported_are_refused(east_run, tmp_path):
    assert "task=export needs checkpoint=… output=…" in east_run("task=export").err
    (tmp_path / "net.onnx.json").write_text("{}")
    answer = east_run("task=export", "checkpoint=somewhere", f"output={tmp_path}/net.onnx")
    assert answer.code == 2
    assert "net.onnx.json exists already; force=true replaces it" in answer.err
    with pytest.raises(ConfigError, match="its folder or a fitted EASTClassifier, got int"):
        east.export(3, tmp_path / "three.onnx")


def test_all_files_get_the_usual_permissions(tmp_path, monkeypatch):
    """The weights and both files of an export follow the umask."""
    monkeypatch.setattr("east.lab.training.export.onnx_bytes", lambda *_: b"")
    X, y = np.eye(20), np.arange(20) % 2
    model = EASTClassifier(max_epochs=1, hidden=(4,), device="cpu").fit(X, y).to_model()
    (tmp_path / "plain").touch()
    model.save(tmp_path / "model")
    east.export(model, tmp_path / "model.onnx")
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*") if path.is_file()}
    assert len(list(tmp_path.rglob("*"))) == 6
    assert modes == {stat.S_IMODE((tmp_path / "plain").stat().st_mode)}
