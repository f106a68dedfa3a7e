"""Pretrained networks: a command with them from photographs to predictions, and what their weights may be."""

import pickle
from unittest.mock import Mock
from urllib.error import URLError

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torchvision.models import get_model

import east
from east.lab.models.backbone import Backbone
from east.lab.training import engine
from tests.commands import record_files
from tests.made import ended_at_checkpoint
from tests.test_devices import compared, loss_section, splits_of, trial

ARCH = "shufflenet_v2_x0_5"
WORDS = ["loss=f1", "model=backbone", f"model.arch={ARCH}", "model.size=32", "dataset=images", "dataset.size=16",
         "trials=1", "protocol.max_epochs=2", "hyper.batch_size=8", "device=cpu", "executor=inline"]  # fmt: skip


@pytest.fixture
def run(east_run, tmp_path, monkeypatch):
    """Run a command on 30 photographs of two classes; weights.pth is a network for the 1000 classes of ImageNet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EAST_DATA_DIR", str(tmp_path / "cache"))
    torch.save(get_model(ARCH).state_dict(), "weights.pth")
    for k, pixels in enumerate(np.random.default_rng(0).integers(0, 128, (30, 20, 20, 3), np.uint8)):
        (file := tmp_path / "photos" / ("sea", "wood")[k % 2] / f"{k}.png").parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels + 100 * np.uint8(k % 2)).save(file)
    return lambda *words: east_run(*WORDS, "dataset.path=photos", *words)


def test_from_photographs_to_predictions(run, east_run, tmp_path):
    words = ["model.freeze=true", "save_model=true"]
    first = run(*words, "model.weights=weights.pth")
    assert first.code == 0, first.err
    assert "scaled up to the 32" in first.out
    [(record, text)] = record_files(tmp_path).items()
    state, moved = torch.load("weights.pth"), (tmp_path / "weights.pth").rename(tmp_path / "moved.pth")
    assert run(*words, f"model.weights={moved}").code == 0
    assert record_files(tmp_path) == {record: text}, "the same weights elsewhere are the same trial"
    moved.unlink()
    model = east.load(folder := next((tmp_path / "models").iterdir()))
    kept = model.net.net.state_dict()
    assert [name for name in state if not torch.equal(state[name], kept[name])] == ["fc.weight", "fc.bias"]
    assert model.mean.tolist() == pytest.approx([0.485, 0.456, 0.406])
    assert east_run("task=predict", f"checkpoint={folder}", "input=photos", "output=labels.csv").code == 0
    assert len((tmp_path / "labels.csv").read_text().splitlines()) == 31


@pytest.mark.parametrize("freeze", [False, True])
def test_a_stopped_training_resumes_and_only_what_is_not_frozen_learns(tmp_path, freeze):
    state = get_model(ARCH).state_dict()
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "a.safetensors")
    torch.save({"model": {f"module.{name}": tensor for name, tensor in state.items()}, "epoch": 1}, tmp_path / "b.pth")
    options = {
        "arch": ARCH,
        "weights": str(tmp_path / ("a.safetensors", "b.pth")[freeze]),
        "freeze": freeze,
        "size": 32,
    }
    trials = [trial(loss_section("f1"), {"name": "backbone", **options}, epochs=2)]
    splits = splits_of((3, 32, 32), "image", tuple("abc"))
    [whole] = engine.train(trials, splits, device="cpu")
    ended_at_checkpoint(1, KeyboardInterrupt(), lambda: engine.train(trials, splits, device="cpu", checkpoint=tmp_path))
    [resumed] = engine.train(trials, splits, device="cpu", checkpoint=tmp_path)
    assert all(torch.equal(whole.weights[name], resumed.weights[name]) for name in whole.weights)
    same = [name for name in state if torch.equal(whole.weights[f"net.{name}"], state[name])]
    assert len(same) == (len(state) - 2 if freeze else 0)
    net, images = Backbone((3, 16, 16), 3, 0.5, **options).train(), torch.randn(4, 3, 16, 16)
    assert not torch.equal(net(images), net(images)), "dropout"
    if freeze:  # Adam amplifies what a deep untrained network makes of rounding errors
        compared(trials, splits)


@pytest.mark.parametrize(
    "words, code, told",
    [
        ("model.weights=DEFAULT", 3, "cannot be downloaded (<urlopen error no route"),
        ("model.weights=nowhere.pth", 3, "nowhere.pth: there is no such file"),
        ("model.weights=code.pth", 3, "Weights only load failed"),
        ("model.weights=other.pth", 3, f"these are not weights of model.arch={ARCH}"),
        ("model.arch=resnet19", 2, "'resnet19', did you mean 'resnet18'?"),
        ("model.size=4", 2, "model.size: expected 8 to 1024"),
        ("model.weights=none model.arch=squeezenet1_1 model.size=8", 2, "model.arch=squeezenet1_1: it fails"),
    ],
)
def test_what_cannot_be_used_is_told_before_training(run, tmp_path, monkeypatch, words, code, told):
    monkeypatch.setattr("torch.hub.urlopen", Mock(side_effect=URLError("no route")))
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path))
    (tmp_path / "code.pth").write_bytes(pickle.dumps(print))
    torch.save({"weight": torch.zeros(2)}, "other.pth")
    answer = run(*words.split())
    assert (answer.code, told in answer.err) == (code, True), answer.err
