"""Typed settings are composed and completed, or refused with a suggestion before any work."""

import shlex

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from east.choices import CONF, ConfigError, choose, groups, install_hint
from east.lab.settings import settings as models
from east.lab.settings.command import Command, sweep
from east.lab.settings.compose import all_settings
from east.lab.settings.compose import composed as one_by_one
from east.lab.settings.compose import settings as composed


def settings(words):
    return composed(Command.parse(words))


def combinations(words):
    return all_settings(Command.parse(words))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["loss=F1"], "did you mean 'f1'?"),
        (["dataset=mamography"], "did you mean 'mammography'?"),
        (["hyper.lrr=1"], "did you mean 'hyper.lr'?"),
        (["hyper={lrr: 1}"], "did you mean 'hyper.lr'?"),
        (["trails=3"], "did you mean 'trials'?"),
        (["annealing.gamma=1"], "Choices: annealing.T0"),
        (["table=east_v2_8"], "did you mean 'east_v2_"),
        (["device=gpu"], "unknown device 'gpu'"),
        (["selection=loss"], "did you mean 'val_loss'?"),
        (["annealing.outer=firm"], "Choices: hard, soft"),
        (["hyper.batch_size=0.5"], "hyper.batch_size: expected a whole number"),
        (["hyper.batch_size=0"], "hyper.batch_size: expected a whole number of at least 1, got 0"),
        (["hyper.batch_size=true"], "hyper.batch_size: expected a whole number"),
        (["hyper.lr=fast"], "hyper.lr: expected a number from 1e-12 to 1000, got 'fast'"),
        (["hyper.lr=-1"], "hyper.lr: expected a number from"),
        (["hyper.dropout=1"], "hyper.dropout: expected a number from 0 to 0.99, got 1"),
        (["hyper.average=2"], "hyper.average: expected a number above 0 and below 1, got 2"),
        (["hyper.clip=none"], "hyper.clip: expected a number"),
        (["trials=2.5"], "trials: expected a whole number from 1 to 1000, got 2.5"),
        (["trials=0"], "trials"),
        (["seed=1.5"], "seed: expected a whole number of at least 0 and below 2^32, got 1.5"),
        (["seed=4294967296"], "seed: expected a whole number of at least 0 and below 2^32"),
        (["seed=4294967295", "trials=2"], "seed=4294967295 trials=2: expected seeds below 2^32"),
        (["seed=4294967290", "preset=budget"], "seed=4294967290 trials=10"),
        (["dataset.limit=ten"], "dataset.limit: expected a whole number of at least 3, got 'ten'"),
        (["split.seed=abc"], "split.seed: expected a whole number of at least 0, or trial, got 'abc'"),
        (["split.seed=-1"], "split.seed"),
        (["split.fractions=[0.8,0.2]"], "expected three positive numbers that add up to 1, for train, validation"),
        (["split.fractions=[0.8,0.1,0.2]"], "got [0.8, 0.1, 0.2]"),
        (["split.fractions=[a,b,c]"], "split.fractions"),
        (["split.stratify=null"], "split.stratify: expected true or false, got None"),
        (["protocol.patience=0"], "protocol.patience"),
        (["model.hidden=512"], "model.hidden: expected a list such as [512, 256, 128], got 512"),
        (["force=maybe"], "force: expected true or false"),
        (["+extra=1"], "cannot be added"),
        (["~hyper"], "cannot be added to or deleted"),
        (["loss=f1,ce"], "several values need -m, or a list"),
        (["loss=[f1"], "cannot read loss=[f1: special characters need quotes"),
        (["dataset=csv", "dataset.drop=[été,b]"], "\"dataset.drop=['été','b']\""),
        (["été=1"], "cannot read été=1: expected name=value"),
        (["dataset=csv", "dataset.path=a,b.csv"], "dataset.path: several values need -m; a comma inside a value needs"),
        (["model=darknet19"], "model=darknet19 does not take table data; choices for digits: mlp"),
        (["dataset=cifar10", "model=gnn"], "does not take image data"),
        (["loss=dice", "annealing=geometric"], "annealing=geometric needs a loss with a temperature; dice has none"),
        (["model=custom"], "model.target has no default"),
        (["config_dir=/nowhere"], "expected a folder"),
        # the protocol's hyperparameters and grid
        (["protocol.hyper.lr=-1"], "protocol.hyper.lr: expected a number from 1e-12 to 1000 or a mapping, got -1"),
        (["protocol.hyper.batch_size={table: 0.5}"], "protocol.hyper.batch_size: expected"),
        (["protocol.hyper={lrr: 1}"], "unknown key 'protocol.hyper.lrr', did you mean 'protocol.hyper.lr'?"),
        (
            ["protocol.grid.lr=[-1]"],
            "expected a list with at least one entry, each a number from 1e-12 to 1000, got -1",
        ),
        (["protocol.grid.lr=[]"], "protocol.grid.lr: expected a list with at least one entry, each a number"),
        (["protocol.grid.r=[5]"], "each a number from 0.001 to 0.999, got 5"),
        (["protocol.grid.dropout=[1]"], "each a number from 0 to 0.99, got 1"),
        (["protocol.grid.batch_size.table=[0]"], "protocol.grid.batch_size: expected sizes of at least 1"),
        (["protocol.grid.batch_size.table=[]"], "protocol.grid.batch_size: expected sizes of at least 1"),
        # keys below a value
        (["hyper.lr.foo=3"], "hyper.lr.foo: hyper.lr has no keys: write hyper.lr=…"),
        (["dataset.limit.foo=1"], "dataset.limit has no keys"),
        (["dataset=csv", "dataset.drop.foo=1"], "dataset.drop has no keys"),
        (["loss=fbeta", "loss.beta.dog=1"], "loss.beta has no keys"),
        (["preset.grid.lrr=[1]"], "unknown key 'preset.grid.lrr', did you mean 'preset.grid.lr'?"),
        (["hyper=3"], "hyper: expected a mapping, got 3"),
        # what describes a loss
        (["loss.trains=foo"], "loss.trains comes from the chosen file: write loss=… instead"),
        (["loss.has_temperature=maybe"], "loss.has_temperature comes from the chosen file"),
        (["search.foo=1"], "unknown key 'search.foo', did you mean"),
        (["executor=inline", "executor.slots=2"], "Choices: none"),
        (["dataset=synthetic", "dataset.rows=1000.5"], "dataset.rows: expected a whole number, got 1000.5"),
        (["loss._target_=3"], "loss._target_: expected text, got 3"),
        (["loss._target_=east.losses.Dise"], "cannot import 'east.losses.Dise'"),
        # options of a loss and of its metric
        (["loss=rf", "loss.n_estimaters=5"], "unknown key 'loss.n_estimaters', did you mean 'loss.n_estimators'?"),
        (["loss=rf", "loss.n_estimators=abc"], "loss.n_estimators: expected a whole number, got 'abc'"),
        (["loss=rf", "loss.n_estimators=1.5"], "loss.n_estimators: expected a whole number, got 1.5"),
        (["loss=rf", "loss.max_samples=all"], "loss.max_samples: expected a whole number, got 'all'"),
        (["loss=boosting", "loss.leaves=[4,b]"], "loss.leaves: expected a whole number or a list, got [4, 'b']"),
        (["loss=focal", "loss.gamma=abc"], "loss.gamma: expected a number, got 'abc'"),
        (["loss=f1", "loss.detach_threshold=1"], "loss.detach_threshold: expected true or false, got 1"),
        (["loss=mcc", "loss.positive=3"], "unknown key 'loss.positive'"),
        (["loss=metric", "loss.metric=fbeta", "loss.betta=2"], "did you mean 'loss.beta'?"),
        (["loss=metric", "loss.metric=fbeta", "loss.parameters.betta=2"], "did you mean 'loss.parameters.beta'?"),
        (["loss=metric", "loss.parameters.beta=2"], "metric balanced_accuracy takes no parameters"),
        (["loss=metric", "loss.parameters=3"], "loss.parameters: expected a mapping such as {beta: 2}, got 3"),
        (["loss=ce", "loss.parameters={beta: 2}"], "unknown key 'loss.parameters'"),
        # parameters without an effect
        (["loss=f1", "loss.ignore_index=3"], "loss.ignore_index=3: it has no effect on the trials of east-run"),
        (["loss=ce", "loss.ignore_index=3"], "it has no effect"),
        (["loss=f1_ce", "loss.gather=true"], "it has no effect"),
        # what comes from the chosen file
        (["dataset.name=foo"], "dataset.name comes from the chosen file: write dataset=… instead"),
        (["dataset={name: foo}"], "write dataset=… instead"),
        (["loss.name=foo"], "write loss=… instead"),
        (["preset.name=foo"], "write preset=… instead"),
        (["dataset.kind=image"], "write dataset=… instead"),
        (["preset.search=grid"], "preset.search=grid: write search=… instead"),
        (["protocol.search=foo"], "write search=… instead"),
        (["protocol={search: foo}"], "write search=… instead"),
        (["protocol.annealing=foo"], "write annealing=… instead"),
        (["protocol.model.table=foo"], "write model=… instead"),
        (["preset.model={table: foo}"], "write model=… instead"),
        (["preset.dataset.digits.imbalance=3"], "write dataset.imbalance=… instead"),
        (["preset.network.mlp.hidden=[8]"], "write model.hidden=… instead"),
        (
            ["dataset=adult", "preset=budget", "preset.grid.batch_size={image: [128]}"],
            "grid.batch_size: expected sizes for 'table' or 'adult', got ['image']",
        ),
    ],
)
def test_a_wrong_setting_is_refused_with_a_suggestion(overrides, words):
    with pytest.raises(ConfigError) as error:
        settings(overrides)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["losses=f1"], "expected a list such as losses=[f1,ce], got 'f1'"),
        (["losses=f1,ce"], "expected a list such as losses=[f1,ce], got 'f1,ce'"),
        (["losses=[]"], "expected a list"),
        (["losses=[f1,cee]"], "unknown loss 'cee', did you mean 'ce'?"),
        (["datasets=[adlut]"], "unknown dataset 'adlut', did you mean 'adult'?"),
        (["losses=[f1,ce]", "loss.beta=2"], "loss.beta=2: `loss` and `loss.*` cannot be combined with losses=[…]"),
        (["losses=[f1,ce]", "loss=mcc"], "loss=mcc: `loss`"),
        (["losses=[f1,ce]", "loss={beta: 2}"], "loss.beta=2: `loss`"),
        (["datasets=[adult]", "dataset.split=pooled"], "combined with datasets=[…]"),
    ],
)
def test_a_wrong_list_is_refused_with_a_suggestion(overrides, words):
    with pytest.raises(ConfigError) as error:
        combinations(overrides)
    assert words in str(error.value)


def test_lists_give_every_combination_in_order():
    found = combinations(["losses=[ce,f1,ce]", "datasets=[adult,digits]", "dataset.limit=100"])
    assert [(c.dataset.name, c.loss.name) for c in found] == [
        ("adult", "ce"), ("adult", "f1"), ("digits", "ce"), ("digits", "f1"),
    ]  # fmt: skip
    assert {c.dataset.limit for c in found} == {100}


def test_a_search_of_several_losses_leaves_classical_models_as_they_are():
    searching = ["search=halving", "search.factor=2", "preset=budget"]
    network, classical = combinations(["losses=[ce,logistic]", *searching])
    assert (network.search.name, network.search.factor) == ("halving", 2)
    assert classical == settings(["loss=logistic", "preset=budget"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["loss=rf", "search=grid"], "search=grid: a search needs a loss that trains a network, got rf; leave it out"),
        (["loss=ccs", "search=halving"], "search=halving: a search needs a loss that trains a network, got ccs"),
        (["losses=[rf,logistic]", "search={factor: 3}"], "search.factor=3: a search needs .* got rf, logistic"),
    ],
)
def test_a_search_without_a_network_is_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        combinations(words)
    assert not any(found.searched for found in combinations([words[0], "search=none"]))


def test_lists_are_composed_with_the_rest_of_the_command():
    """The network is checked against the datasets of the list, not against the default one."""
    (found,) = combinations(["datasets=[cifar10]", "model=darknet19"])
    assert found.model.name == "darknet19"


def test_a_sweep_is_every_combination():
    jobs = sweep(["dataset=a,b", "loss=c", "seed=1,2"])
    assert [tuple(job.values.values()) for job in jobs] == [("a", "c", 1), ("a", "c", 2), ("b", "c", 1), ("b", "c", 2)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("path", "daten (1).csv"),
        ("path", "my[1]=2.csv"),
        ("path", "plain.csv"),
        ("target", "été"),
        ("target", "Bob's"),
        ("target", "f(x)"),
        ("delimiter", ";"),
        ("delimiter", ","),
        ("delimiter", "\t"),
        ("positive", ">50K"),
        ("positive", 3),
    ],
)
def test_paths_and_names_need_no_quotes(name, value):
    assert settings(["dataset=csv", f"dataset.{name}={value}"]).dataset.options[name] == value


@pytest.mark.parametrize("value", ["2024", "1e3", "007", "true", "nan"])
def test_a_path_is_text_even_if_it_looks_like_a_number(value):
    command = Command.parse([f"dataset.path={value}", f"results_dir={value}"])
    assert command.values == {"dataset": "csv", "dataset.path": value, "results_dir": value}
    assert Command.parse(command.words) == command
    (job,) = sweep([f"input={value}"])
    assert job.values == {"input": value}


def test_a_tilde_is_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/folder")
    found = settings(["dataset=csv", "dataset.path=~/a.csv", "results_dir=~/results", "dataset.delimiter=~"])
    options = found.dataset.options
    assert (options["path"], options["delimiter"]) == ("/folder/a.csv", "~")
    assert found.results_dir == "/folder/results"


def test_quoted_values_can_be_swept(monkeypatch):
    monkeypatch.setenv("HOME", "/folder")
    jobs = sweep(["dataset=csv", "dataset.path=~/a.csv,b (1).csv", "dataset.target=été"])
    assert [composed(job).dataset.options["path"] for job in jobs] == ["/folder/a.csv", "b (1).csv"]


TEXTS = [
    *(
        "plain",
        "a/b-c.csv",
        "",
        " ",
        "\t",
        " a ",
        "a b",
        "a, b",
        "a,b",
        ",",
        "null",
        "NULL",
        "true",
        "False",
        "1",
        "-1",
    ),
    *("1e3", "1_000", "inf", "nan", "[a]", "{a: 1}", "a:b", "a=b", "f(x)", "glob(f*)", "it's", '"', "'", "a'\"b", "\\"),
    *("a\\", "\\'", "'quoted'", "~/a.csv", "~", "été", ">50K", "100%", "$x", "#", "a\nb", "choice(a,b)", "[", "a}"),
]
NUMBERS = [0.1234567, 1e-05, 1e20, 0.1 + 0.2, -0.0, 5.0, float("inf"), 10**20, -3, True, False, None]


@pytest.mark.parametrize("name", ["dataset.target", "dataset.path", "loss.metric"])
def test_a_printed_command_is_read_back_as_the_same_values(name):
    """Each value alone, in a list, and in a mapping; words that are typed as they are stay without quotes."""
    numbers = [None] if name == "dataset.path" else NUMBERS  # a path is text
    for value in [*TEXTS, *numbers, TEXTS, NUMBERS, [], {}, {"a b": TEXTS, "c:d, (e)": {"f": NUMBERS}, 1: 2.5}]:
        command = Command({"dataset": "csv", name: value})
        again = Command.parse(shlex.split(shlex.join(command.words)))
        assert repr(again.values) == repr(command.values), command.words
    plain = ["dataset=csv", "dataset.target=daten (1).csv", "hyper.lr=0.001", "losses=[f1,ce]", "loss.beta={dog:0.25}"]
    assert Command.parse(plain).words == plain


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["dataset=digits"], {"preset": "quick", "model": "mlp", "search": "none", "annealing": "geometric"}),
        (["dataset=adult"], {"preset": "paper", "model": "mlp", "search": "grid", "annealing": "geometric"}),
        (["dataset=adult", "loss=ce"], {"search": "grid", "annealing": "none"}),
        (["dataset=adult", "loss=metric", "loss.step=sigmoid", "loss.slope=10"], {"annealing": "none"}),
        (["dataset=adult", "loss=rf"], {"search": "none", "annealing": "none"}),
        (["dataset=adult", "protocol=btg", "loss=bce"], {"model": "mlp_btg", "search": "none"}),
        (["dataset=cifar10"], {"model": "darknet19", "preset": "paper"}),
        (["dataset=cifar10", "preset=budget"], {"model": "tiny_darknet", "search": "grid"}),
        (["dataset=cifar10", "preset=budget", "model=darknet19"], {"model": "darknet19"}),
        (["dataset=cocktailparty_graph", "protocol=btg", "loss=bce"], {"model": "gnn"}),
        (["dataset=mammography", "protocol=east_v1"], {"annealing": "none", "search": "grid"}),
    ],
)
def test_choices_left_open_are_filled_in(overrides, expected):
    found = settings(overrides)
    assert {group: getattr(found, group).name for group in expected} == expected


def test_hyperparameters_left_open_come_from_the_protocol():
    """lr 1e-3, dropout 0.25, batch 256, for images 128. Values set by the user are fixed in the search."""
    table, image = settings(["dataset=digits", "hyper.lr=0.5"]), settings(["dataset=cifar10"])
    expected = {"lr": 0.5, "batch_size": 256, "dropout": 0.25, "weight_decay": 0.01, "clip": None}
    assert table.hyper.to_json() == expected
    assert image.hyper.batch_size == 128
    assert table.fixed == {"lr"}
    assert image.fixed == frozenset()


def test_a_preset_sets_dataset_options_unless_you_do():
    assert settings(["dataset=caltech256", "preset=paper"]).dataset.options["size"] == 224
    assert settings(["dataset=caltech256", "preset=budget"]).dataset.options["size"] == 64
    assert settings(["dataset=caltech256", "preset=paper", "dataset.size=32"]).dataset.options["size"] == 32


def test_a_preset_sets_options_of_its_network_unless_you_do():
    assert settings(["dataset=cifar10", "preset=half"]).model.options["width"] == 0.5
    assert settings(["dataset=cifar10", "preset=half", "model.width=0.25"]).model.options["width"] == 0.25
    assert settings(["dataset=cifar10", "preset=half", "model=tiny_darknet"]).model.options["width"] == 1


def test_settings_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        settings([]).dataset.name = "changed"


def test_the_largest_seed_is_accepted():
    assert settings(["seed=4294967295", "trials=1"]).seed == 4294967295


def test_mappings_can_be_values():
    assert settings(["loss=fbeta", "loss.beta={dog: 0.25}"]).loss.options["beta"] == {"dog": 0.25}
    for written in ("loss.parameters={beta: 2}", "loss.parameters.beta=2"):
        found = settings(["loss=metric", "loss.metric=fbeta", written])
        assert found.loss.options["parameters"] == {"beta": 2}
    found = settings(["preset=quick", "search=grid", "preset.grid.lr=[0.5]", "hyper.batch_size=8", "hyper.dropout=0"])
    assert [point["lr"] for point in found.grid()] == [0.5, 0.5], "two cooling rates, as in the protocol"


@pytest.mark.parametrize(
    ("mappings", "keys"),
    [
        (["hyper={lr: 0.1, clip: 1}", "split={stratify: false}"], "hyper.lr=0.1 hyper.clip=1 split.stratify=false"),
        (["hyper={lr: 0.1}", "hyper.lr=0.2"], "hyper.lr=0.2"),
        (["hyper.lr=0.2", "hyper={lr: 0.1}"], "hyper.lr=0.1"),
        (["dataset={path: a.csv, target: y}"], "dataset.path=a.csv dataset.target=y"),
        (["loss=fbeta", "loss={beta: {dog: 0.25}}"], "loss=fbeta loss.beta={dog:0.25}"),
        (["protocol={grid: {lr: [0.1]}}"], "protocol.grid={lr:[0.1]}"),
    ],
)
def test_a_section_typed_as_a_mapping_is_the_same_command_as_its_keys(mappings, keys):
    assert Command.parse(mappings).values == Command.parse(keys.split()).values


def test_your_own_configs_are_composed(tmp_path):
    (tmp_path / "loss").mkdir()
    (tmp_path / "loss" / "mine.yaml").write_text("name: mine\n_target_: east.losses.Dice\n")
    found = settings(["loss=mine", f"config_dir={tmp_path}"])
    assert found.loss.to_json() == {"name": "mine", "_target_": "east.losses.Dice"}
    assert found.annealing.name == "none"
    with pytest.raises(ConfigError, match="did you mean 'mine'"):
        settings(["loss=mien", f"config_dir={tmp_path}"])
    (tmp_path / "loss" / "f1.yaml").write_text("name: f1\n")
    with pytest.raises(ConfigError, match="already exists"):
        settings(["loss=f1", f"config_dir={tmp_path}"])


def test_a_missing_extra_is_named_with_its_install_command(monkeypatch):
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    for override, extra in (
        ("executor=ray", "ray"),
        ("executor=submitit", "slurm"),
        ("tensorboard=true", "tensorboard"),
    ):
        with pytest.raises(ConfigError) as error:
            settings([override])
        assert install_hint(extra) in str(error.value)


def test_a_loss_parameter_missing_from_its_yaml_is_accepted_if_its_class_takes_it():
    assert settings(["loss=f1", "loss.temperature=0.1"]).loss.options["temperature"] == 0.1
    with pytest.raises(ConfigError, match=r"unknown key 'loss.temprature'"):
        settings(["loss=f1", "loss.temprature=0.1"])


def test_parameters_of_the_metric_are_accepted():
    assert settings(["loss=metric", "loss.metric=fbeta", "loss.beta=2"]).loss.options["beta"] == 2
    found = settings(["loss=f1", "loss.average=positive", "loss.positive=3"])
    assert found.loss.arguments["positive"] == 3
    assert settings(["loss=btg_auroc", "loss.detach_threshold=true"]).loss.options["detach_threshold"] is True
    assert settings(["loss=focal", "loss.class_weights=balanced"]).loss.options["class_weights"] == "balanced"


@pytest.mark.parametrize(
    "default",
    ["loss=f1 loss.ignore_index=-100", "loss=f1 loss.gather=auto", "loss=f1_ce loss.floor=0.02",
     "loss=f1 loss.classes=null", "loss=ce loss.ignore_index=-100", "loss=rf loss.max_samples=null"],
)  # fmt: skip
def test_a_typed_default_of_the_signature_is_the_same_trial(default):
    loss, _ = default.split()
    assert settings(default.split()).loss.to_json() == settings([loss]).loss.to_json()


def test_the_default_of_a_metric_that_the_data_override_is_kept():
    """Without it, the positive class is that of the data."""
    found = settings(["loss=f1", "loss.average=positive", "loss.positive=1"])
    assert found.loss.options["positive"] == 1


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("dataset/digits-rare", "{name: digits-rare, kind: table, imbalanc: 3}", "did you mean 'dataset.imbalance'?"),
        ("dataset/digits-rare", "{name: digits-rare, imbalance: many}", "expected a number such as 1, got 'many'"),
        ("dataset/digits-rare", "{name: digits-rare, kind: image}", "dataset.kind: expected table, got 'image'"),
        ("dataset/csv-mine", "{name: csv-mine, tagret: y}", "did you mean 'dataset.target'?"),
        ("dataset/x", "{name: digits}", "expected name: x, as the file is called, got 'digits'; a variant of it is"),
        ("dataset/x", "{name: x}", "unknown dataset 'x'"),
        ("dataset/x", "{kind: table}", "expected name: x, as the file is called, got None"),
        ("loss/x", "{name: f1, _target_: east.losses.Dice}", "expected name: x, as the file is called, got 'f1'"),
        ("loss/x", "{name: x}", "loss._target_ is missing: add it to the loss file"),
        ("loss/x", "{name: x, _target_: a.B, trains: foo}", "unknown loss.trains 'foo'. Choices: classical, network"),
        ("loss/x", "{name: x, _target_: a.B, has_temperature: maybe}", "loss.has_temperature: expected true or false"),
        ("loss/x", "{name: x, _target_: east.losses.Focal, gama: 2}", "did you mean 'loss.gamma'?"),
        ("loss/x", "{name: x, _target_: east.losses.MetricLoss, metric: mcc, beta: 2}", "unknown key 'loss.beta'"),
        ("loss/x", "{name: x, _target_: east.losses.MetricLoss, ignore_index: 3}", "it has no effect"),
        ("loss/x", "{name: x, _target_: east.baselines.CCS, trains: classical, decod: set}", "'loss.decode'?"),
        ("model/x", "{name: x, target: a.Net, parameter: {width: 3}}", "did you mean 'model.parameters'?"),
        ("protocol/x", "{name: east}", "expected name: x, as the file is called, got 'east'"),
        ("protocol/x", "{name: x}", "protocol=x names no network for table data: write model=…"),
        ("protocol/x", "{name: x, model: {table: mlpp}}", "unknown model 'mlpp', did you mean 'mlp'?"),
        ("protocol/x", "{name: x, model: mlp}", "protocol.model: expected a mapping, got 'mlp'"),
        ("preset/x", "{name: x, dataset: {digits: {imbalanc: 3}}}", "did you mean 'dataset.imbalance'?"),
        ("preset/x", "{name: y}", "expected name: x, as the file is called, got 'y'"),
        ("annealing/x", "{name: geometric}", "expected name: x, as the file is called, got 'geometric'"),
    ],
)  # fmt: skip
def test_your_own_file_is_checked_like_the_command_line(file, text, words, tmp_path):
    group, _, name = file.partition("/")
    (tmp_path / group).mkdir()
    (tmp_path / f"{file}.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        settings([f"{group}={name}", f"config_dir={tmp_path}"])
    assert words in str(error.value)


def test_your_own_variants_of_our_parts_compose(tmp_path):
    for file, text in {
        "dataset/digits-rare": "{name: digits-rare, imbalance: 1.5}",
        "executor/cluster": "{name: processes, slots: 3}",
        "loss/sharp": "{name: sharp, _target_: east.losses.MetricLoss, metric: fbeta, beta: {dog: 2}, gather: auto}",
    }.items():
        (tmp_path / file).parent.mkdir()
        (tmp_path / f"{file}.yaml").write_text(text)
    own = ["dataset=digits-rare", "executor=cluster", "loss=sharp", "dataset.positive=3", "dataset.limit=100"]
    found = settings([*own, f"config_dir={tmp_path}"])
    assert (found.executor.name, found.executor.slots) == ("processes", 3)
    assert found.dataset.options == {"imbalance": 1.5, "positive": 3}
    assert found.loss.options["beta"] == {"dog": 2}


def test_choose_suggests_and_lists():
    assert choose("metric", "f1", ["f1", "mcc"]) == "f1"
    with pytest.raises(ConfigError, match=r"unknown metric 'mmc', did you mean 'mcc'\? Choices: f1, mcc"):
        choose("metric", "mmc", ["mcc", "f1"])


def test_groups_are_the_folders_of_conf():
    assert set(groups()) == {folder.name for folder in CONF.iterdir() if folder.is_dir()}


def test_empty_mappings_are_filled():
    config = settings(
        ["model=custom", "model.target=a.Net", "model.parameters.width=8", "model.parameters.deep={b: 1}"]
    )
    assert config.model.options["parameters"] == {"width": 8, "deep": {"b": 1}}
    assert settings(["model=custom", "model.target=a.Net", "model.parameters={width: 8}"]).model.options[
        "parameters"
    ] == {"width": 8}


@pytest.mark.parametrize("preset", ["paper", "budget", "quick"])
@pytest.mark.parametrize("loss, annealing", [("f1", "geometric"), ("ce", "none")])
def test_composing_files_one_by_one_matches_hydra(preset, loss, annealing):
    chosen = {"dataset": "caltech256", "loss": loss, "protocol": "east", "model": "darknet19", "search": "grid"}
    chosen |= {"annealing": annealing, "executor": "ray", "preset": preset}
    with initialize_config_dir(str(CONF), version_base="1.3"):
        whole = compose("config", [f"{group}={name}" for group, name in chosen.items()])
    assert one_by_one(groups(), chosen) == OmegaConf.to_container(whole, resolve=True)


def test_your_own_file_may_have_a_defaults_list(tmp_path):
    (tmp_path / "loss").mkdir()
    (tmp_path / "loss" / "sharp.yaml").write_text("defaults: [f1, _self_]\nname: sharp\ntemperature: 0.05\n")
    found = settings(["loss=sharp", f"config_dir={tmp_path}"]).loss
    assert (found.name, found.options["metric"], found.options["temperature"]) == ("sharp", "f1", 0.05)
