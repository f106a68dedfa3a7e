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
OPTIONS = {"arch": ARCH, "weights": "none", "freeze": False, "size": 32}
SECTION = {"name": "backbone", **OPTIONS}
WORDS = ["loss=f1", "model=backbone", f"model.arch={ARCH}", "model.size=32", "dataset=images", "dataset.size=16",
         "trials=1", "protocol.max_epochs=2", "hyper.batch_size=8", "device=cpu", "executor=inline"]  # fmt: skip


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A state dict for the 1000 classes of ImageNet, in a file; and a folder with photographs of two classes."""
    folder, random = tmp_path_factory.mktemp("pretrained"), np.random.default_rng(0)
    torch.manual_seed(0)
    torch.save(get_model(ARCH).state_dict(), folder / "weights.pth")
    for k in range(30):
        (file := folder / "photos" / ("sea", "wood")[k % 2] / f"{k}.png").parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 128, (20, 20, 3), np.uint8) + 100 * np.uint8(k % 2)).save(file)
    return folder


@pytest.fixture
def run(east_run, pretrained, tmp_path, monkeypatch):
    monkeypatch.setenv("EAST_DATA_DIR", str(tmp_path / "cache"))  # of decoded images
    return lambda *words: east_run(*WORDS, f"dataset.path={pretrained / 'photos'}", *words)


def test_from_photographs_to_predictions(run, east_run, pretrained, tmp_path):
    weights = tmp_path / "weights.pth"
    weights.write_bytes((pretrained / "weights.pth").read_bytes())
    words = ["model.freeze=true", "save_model=true"]
    first = run(*words, f"model.weights={weights}")
    assert first.code == 0, first.err
    assert "scaled up to the 32" in first.out
    [(record, text)] = record_files(tmp_path).items()
    moved = weights.rename(tmp_path / "moved.pth")
    assert run(*words, f"model.weights={moved}").code == 0
    assert record_files(tmp_path) == {record: text}, "the same weights elsewhere are the same trial"
    moved.unlink()
    model = east.load(next((tmp_path / "models").iterdir()))
    given, kept = torch.load(pretrained / "weights.pth"), model.net.net.state_dict()
    assert [name for name in given if not torch.equal(given[name], kept[name])] == ["fc.weight", "fc.bias"]
    assert model.mean.tolist() == pytest.approx([0.485, 0.456, 0.406])
    checkpoint = [f"checkpoint={next((tmp_path / 'models').iterdir())}", f"output={tmp_path / 'labels.csv'}"]
    assert east_run("task=predict", *checkpoint, f"input={pretrained / 'photos'}").code == 0
    assert len((tmp_path / "labels.csv").read_text().splitlines()) == 31


@pytest.mark.parametrize("freeze", [False, True])
def test_a_stopped_training_resumes_and_devices_agree(pretrained, tmp_path, freeze):
    section = SECTION | {"weights": str(pretrained / "weights.pth"), "freeze": freeze}
    splits = splits_of((3, 32, 32), "image", tuple("abc"))
    trials = [trial(loss_section("f1"), section, epochs=2)]
    [whole] = engine.train(trials, splits, device="cpu")
    ended_at_checkpoint(1, KeyboardInterrupt(), lambda: engine.train(trials, splits, device="cpu", checkpoint=tmp_path))
    [resumed] = engine.train(trials, splits, device="cpu", checkpoint=tmp_path)
    assert all(torch.equal(whole.weights[name], resumed.weights[name]) for name in whole.weights)
    if freeze:  # Adam amplifies what a deep untrained network makes of rounding errors
        compared(trials, splits)


def test_frozen_layers_stay_as_they_are_and_dropout_comes_before_the_last():
    torch.manual_seed(0)
    nets = {freeze: Backbone((3, 16, 16), 3, 0.5, **(OPTIONS | {"freeze": freeze})).train() for freeze in (True, False)}
    images = torch.randn(4, 3, 16, 16)
    for frozen, net in nets.items():
        before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        assert not torch.equal(net(images), net(images)), "dropout"
        moved = {name for name, tensor in net.state_dict().items() if not torch.equal(tensor, before[name])}
        assert bool(moved) != frozen, "statistics of batch norm"
        learn = {name for name, parameter in net.named_parameters() if parameter.requires_grad}
        assert (learn == {"net.fc.weight", "net.fc.bias"}) == frozen
    net = nets[True].eval()
    larger = torch.nn.functional.interpolate(images, 32, mode="bilinear", antialias=True)
    assert torch.equal(net(images), net(larger))


@pytest.mark.parametrize(
    "words, code, told",
    [
        (["model.weights=DEFAULT"], 3, ["cannot be downloaded (<urlopen error no route", ".pth", "model.weights=FILE"]),
        (["model.weights=nowhere.pth"], 3, ["nowhere.pth: there is no such file", "torch.save"]),
        (["model.weights={code}"], 3, ["Weights only load failed"]),
        (["model.weights={other}"], 3, [f"not weights of model.arch={ARCH}", "conv1"]),
        (["model.weights=none", "model.arch=resnet19"], 2, ["'resnet19', did you mean 'resnet18'?"]),
        (["model.weights=none", "model.size=4"], 2, ["model.size: expected 8 to 1024"]),
        (["model.weights=none", "model.arch=squeezenet1_1", "model.size=8"], 2, ["model.arch=squeezenet1_1: it fails"]),
    ],
)
def test_what_cannot_be_used_is_told_before_training(run, tmp_path, monkeypatch, words, code, told):
    monkeypatch.setattr("torch.hub.urlopen", Mock(side_effect=URLError("no route")))
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path))
    (tmp_path / "code").write_bytes(pickle.dumps(print))
    torch.save({"weight": torch.zeros(2)}, tmp_path / "other")
    answer = run(*(word.format(**{name: tmp_path / name for name in ("code", "other")}) for word in words))
    assert answer.code == code, answer.err
    assert all(" ".join(word.split()) in answer.err for word in told), answer.err


def test_safetensors_and_the_state_dicts_of_training_scripts_are_read(pretrained, tmp_path):
    state = torch.load(pretrained / "weights.pth")
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "a.safetensors")
    torch.save({"model": {f"module.{name}": tensor for name, tensor in state.items()}, "epoch": 1}, tmp_path / "b.pth")
    for file in ("a.safetensors", "b.pth"):
        net = Backbone((3, 16, 16), 2, **(OPTIONS | {"weights": str(tmp_path / file)}))
        assert torch.equal(net.net.conv1[0].weight, state["conv1.0.weight"])
