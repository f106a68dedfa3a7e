"""Loggers get every epoch of every trial; W&B here is a stand-in that notes what it is called with."""

import sys
from types import SimpleNamespace

import pytest

CALLS = []


class Noted:
    """A logger of the user's own."""

    def start(self, name, config, folder):
        self.seed = config["seed"]
        CALLS.append(("start", self.seed, config["loss"]["name"]))

    def log(self, step, values):
        CALLS.append(("log", self.seed, step, {*values}))

    def close(self):
        CALLS.append(("close", self.seed))


@pytest.fixture
def wandb(monkeypatch):
    """The part of W&B that is used."""

    def init(*, project, name, config, dir, reinit, settings):
        noted = Noted()
        noted.start(name, config, dir)
        assert (project, reinit) == ("east", "create_new")
        return SimpleNamespace(log=lambda values, step: noted.log(step, values), finish=noted.close)

    module = SimpleNamespace(init=init, Settings=dict, __spec__=SimpleNamespace())
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    monkeypatch.setitem(sys.modules, "wandb", module)


@pytest.mark.usefixtures("wandb")
@pytest.mark.parametrize("logger", ["wandb", f"{__name__}.Noted"])
def test_a_logger_gets_every_epoch_of_every_trial(logger, east_run):
    CALLS.clear()
    command = ("dataset=digits", "loss=ce", "trials=2", "executor=inline", "protocol.max_epochs=2")
    assert east_run(*command, f"logger={logger}").code == 0
    names = {"train_loss", "val_loss", "val_metric"}
    for seed in (0, 1):
        mine = [call for call in CALLS if call[1] == seed]
        epochs = [("log", seed, epoch, names) for epoch in (1, 2)]
        assert mine == [("start", seed, "ce"), *epochs, ("close", seed)]


@pytest.mark.parametrize(
    "word, message",
    [
        ("tensorboard=true", "did you mean 'logger=tensorboard'"),
        ("logger=missing.Logger", "cannot import 'missing.Logger'"),
        ("logger=os.path", "expected a class with the methods start, log and close"),
    ],
)
def test_a_wrong_logger_is_named(word, message, east_run):
    answer = east_run("loss=f1", word)
    assert answer.code
    assert message in answer.err
