"""What a paper prescribes: the grid, the seeds, the scientific part of a config."""

import pytest

from east.experiment import protocols, records
from east.experiment.settings import settings


@pytest.mark.parametrize(
    ("overrides", "points"),
    [
        # lr x dropout x r x batch, section 6.1 of EAST: 3 x 2 x 2 x 5, and without r for a loss that does not anneal
        (["dataset=adult", "loss=f1"], 60),
        (["dataset=adult", "loss=ce"], 30),
        (["dataset=kaggle", "loss=mcc"], 84),  # seven batch sizes
        (["dataset=kaggle", "loss=f1"], 60),
        (["dataset=cifar10", "loss=f1"], 48),  # four
        (["dataset=caltech256", "loss=ce"], 12),  # two
        (["dataset=adult", "loss=f1", "preset=budget"], 4),
        (["dataset=adult", "loss=f1", "hyper.lr=0.05"], 20),
        (["dataset=adult", "loss=f1", "annealing.r=0.7", "hyper.batch_size=64"], 6),
    ],
)
def test_points_of_the_grid(overrides, points):
    assert len(protocols.grid(settings(overrides))) == points


def test_what_the_user_gives_is_kept_at_every_point():
    config = settings(["dataset=adult", "loss=f1", "hyper.lr=0.05"])
    plain = protocols.scientific(config, "f", "adult")
    moved = [protocols.at(plain, point) for point in protocols.grid(config)]
    assert {one["hyper"]["lr"] for one in moved} == {0.05}
    assert {one["annealing"]["r"] for one in moved} == {0.8, 0.9}


def test_points_of_a_grid_are_one_family_and_differ_in_key():
    config = settings(["dataset=adult", "loss=f1"])
    plain = protocols.scientific(config, "f", "adult")
    moved = [protocols.at(plain, point) for point in protocols.grid(config)]
    assert len({records.family(one) for one in moved}) == 1
    assert len({records.key(one) for one in moved}) == 60


def test_trials_of_user_preset_and_paper():
    assert protocols.trials(settings(["dataset=adult"])) == 10
    assert protocols.trials(settings(["dataset=adult", "preset=quick"])) == 2
    assert protocols.seeds(settings(["dataset=adult", "trials=3", "seed=5"])) == range(5, 8)


def test_equal_budget_gives_two_seeds_to_losses_that_do_not_anneal():
    equal = ["dataset=adult", "search=grid", "search.equal_budget=true"]
    assert protocols.search_seeds(settings([*equal, "loss=ce"])) == [1000, 1001]
    assert protocols.search_seeds(settings([*equal, "loss=f1"])) == [1000]
    counts = {loss: protocols.planned(settings([*equal, f"loss={loss}", "trials=10"])) for loss in ("f1", "ce")}
    assert counts == {"f1": 70, "ce": 70}


def test_rounds_of_halving():
    """60 points for 5 epochs, the best 20 for 15, the best 6 in full: 86 trainings and 10 trials."""
    config = settings(["dataset=adult", "loss=f1", "search=halving"])
    assert protocols.rungs(config) == [(5, 60), (15, 20), (None, 6)]
    assert protocols.planned(config) == 96
    assert protocols.rungs(settings(["dataset=adult", "search=grid"])) == [(None, 60)]
    assert protocols.rungs(settings(["dataset=adult", "search=none"])) == []


def test_what_is_not_science_does_not_change_the_key():
    def key(*overrides):
        return records.key(protocols.scientific(settings(["dataset=adult", *overrides]), "f", "adult"))

    same = ["device=cpu", "results_dir=elsewhere", "executor=inline", "trials=3", "seed=4", "force=true",
            "search=none", "selection=val_metric", "save_model=true", "protocol.decisions=[]"]  # fmt: skip
    assert {key(override) for override in same} == {key()}
    other = ["loss=ce", "hyper.lr=0.5", "split.seed=1", "model.hidden=[8]", "annealing.r=0.5", "dataset.split=pooled",
             "protocol.patience=7", "dataset.limit=99", "loss.average=weighted"]  # fmt: skip
    assert len({key(override) for override in other} | {key()}) == len(other) + 1


def test_a_path_does_not_change_the_key_since_the_fingerprint_tells_the_data():
    def key(path, fingerprint):
        return records.key(protocols.scientific(settings(["dataset=csv", f"dataset.path={path}"]), fingerprint, "csv"))

    assert key("a.csv", "1") == key("b.csv", "1")
    assert key("a.csv", "1") != key("a.csv", "2")


def test_new_splits_where_the_protocol_wants_them():
    btg = protocols.scientific(settings(["dataset=adult", "protocol=btg", "loss=bce"]), "f", "adult")
    east = protocols.scientific(settings(["dataset=adult"]), "f", "adult")
    assert (btg["split"]["seed"], east["split"]["seed"]) == ("trial", 0)


def test_baselines_have_no_network_and_no_hyperparameters():
    plain = protocols.scientific(settings(["dataset=adult", "loss=rf"]), "f", "adult")
    assert (plain["model"], plain["hyper"], plain["protocol"]) == ({"name": "rf"}, {}, {"name": "east"})
