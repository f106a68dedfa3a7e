"""What a paper prescribes: the grid, the seeds, and the part of a config that determines a result."""

import pytest

from east.lab.experiment import protocols
from east.lab.settings.command import Command
from east.lab.settings.compose import settings as composed


def settings(words):
    return composed(Command.parse(words))


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
def test_the_grid_has_the_expected_number_of_points(overrides, points):
    assert len(settings(overrides).grid()) == points


def test_points_of_a_grid_are_one_family_that_keeps_the_users_values_and_differ_in_key():
    config = settings(["dataset=adult", "loss=f1", "hyper.lr=0.05"])
    plain = config.science("adult", "f")
    moved = [plain.with_grid_point(point) for point in config.grid()]
    assert {one.hyper.lr for one in moved} == {0.05}
    assert {one.annealing.r for one in moved} == {0.8, 0.9}
    assert len({one.family for one in moved}) == 1
    assert len({one.key for one in moved}) == 20


def test_the_number_of_trials_comes_from_user_preset_or_paper():
    assert settings(["dataset=adult"]).trial_count == 10
    assert settings(["dataset=adult", "preset=quick"]).trial_count == 2
    assert settings(["dataset=adult", "trials=3", "seed=5"]).seeds == range(5, 8)


def test_equal_budget_gives_losses_that_do_not_anneal_a_seed_per_cooling_rate():
    equal = ["dataset=adult", "search=grid", "search.equal_budget=true"]
    assert protocols.search_seeds(settings([*equal, "loss=ce"])) == [1000, 1001]
    assert protocols.search_seeds(settings([*equal, "loss=f1"])) == [1000]
    for more in ([], ["preset=budget"], ["protocol=east_v1"]):  # two cooling rates, one, none
        f1, ce = (protocols.planned(settings([*equal, *more, f"loss={loss}"])) for loss in ("f1", "ce"))
        assert f1 == ce


def test_halving_has_the_expected_rounds():
    """60 points for 5 epochs, the best 20 for 15, the best 6 in full: 86 trainings and 10 trials."""
    config = settings(["dataset=adult", "loss=f1", "search=halving"])
    assert protocols.rounds(config) == [(5, 60), (15, 20), (None, 6)]
    assert protocols.planned(config) == 96
    short = settings(["dataset=adult", "loss=f1", "search=halving", "protocol.max_epochs=10"])
    assert protocols.rounds(short) == [(5, 60), (None, 20)], "15 epochs would be more than full training"
    assert protocols.rounds(settings(["dataset=adult", "search=grid"])) == [(None, 60)]
    assert protocols.rounds(settings(["dataset=adult", "search=none"])) == []


def test_settings_without_effect_on_the_result_do_not_change_the_key():
    def key(*overrides):
        return settings(["dataset=adult", *overrides]).science("adult", "f").key

    same = ["device=cpu", "results_dir=elsewhere", "executor=inline", "trials=3", "seed=4", "force=true",
            "search=none", "selection=val_metric", "save_model=true", "protocol.decisions=[]"]  # fmt: skip
    assert {key(override) for override in same} == {key()}
    other = ["loss=ce", "hyper.lr=0.5", "split.seed=1", "model.hidden=[8]", "annealing.r=0.5", "dataset.split=pooled",
             "protocol.patience=7", "dataset.limit=99", "loss.average=weighted"]  # fmt: skip
    assert len({key(override) for override in other} | {key()}) == len(other) + 1


def test_a_path_does_not_change_the_key_but_the_fingerprint_does():
    def key(path, fingerprint):
        return settings(["dataset=csv", f"dataset.path={path}"]).science("csv", fingerprint).key

    assert key("a.csv", "1") == key("b.csv", "1")
    assert key("a.csv", "1") != key("a.csv", "2")


def test_trials_get_new_splits_if_the_protocol_says_so():
    btg = settings(["dataset=adult", "protocol=btg", "loss=bce"]).science("adult", "f")
    east = settings(["dataset=adult"]).science("adult", "f")
    assert (btg.split.seed, east.split.seed) == ("trial", 0)


def test_baselines_have_no_network_and_no_hyperparameters():
    plain = settings(["dataset=adult", "loss=rf"]).science("adult", "f")
    stored = plain.to_json()
    assert (stored["model"], stored["hyper"], stored["protocol"]) == ({"name": "rf"}, {}, {"name": "east"})


def test_a_value_that_a_grid_repeats_is_searched_once():
    repeated = ["lr=[0.01,0.01,0.001]", "dropout=[0,0.0]", "r=[0.8,0.8]", "batch_size={table: [128,128]}"]
    grid = ["dataset=adult", "search=grid", *(f"protocol.grid.{values}" for values in repeated)]
    assert [point["lr"] for point in settings(grid).grid()] == [0.01, 0.001]
    equal = settings([*grid, "loss=ce", "search.equal_budget=true"])
    assert protocols.searches(equal) == protocols.searches(settings(grid)) == 2
