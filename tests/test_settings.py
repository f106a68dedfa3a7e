"""Typed settings are composed and completed, or refused with a suggestion before any work."""

import shlex

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from east.choices import CONF, ConfigError, groups, install_hint
from east.lab.settings import settings as models
from east.lab.settings.command import LISTS, Command, jobs_of
from east.lab.settings.compose import all_settings
from east.lab.settings.compose import composed as one_by_one
from east.lab.settings.compose import settings as composed

GRID = "{name: x, grid: {lr: [0.1], dropout: [0], r: [0.9], batch_size: {table: [8]}}, "  # of a protocol


def settings(words):
    return composed(Command.parse(words))


def combinations(words):
    return all_settings(Command.parse(words))


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
    assert not classical.searched


def test_a_sweep_is_every_combination():
    jobs = jobs_of(["dataset=a,b", "loss=c", "seed=1,2"])
    assert [" ".join(job) for job in jobs] == [f"dataset={d} loss=c seed={s}" for d in "ab" for s in (1, 2)]
    jobs = jobs_of(["dataset=csv", "dataset.path=a.csv,b (1).csv", "dataset.target=été"])
    assert [settings(job).dataset.options["path"] for job in jobs] == ["a.csv", "b (1).csv"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("path", value) for value in ("daten (1).csv", "my[1]=2.csv", "plain.csv")),
        *(("target", value) for value in ("été", "Bob's", "f(x)")),
        *(("delimiter", value) for value in (";", ",", "\t")),
        *(("positive", value) for value in (">50K", 3)),
    ],
)
def test_paths_and_names_need_no_quotes(name, value):
    assert settings(["dataset=csv", f"dataset.{name}={value}"]).dataset.options[name] == value


@pytest.mark.parametrize("value", ["2024", "1e3", "007", "true", "nan"])
def test_a_path_is_text_even_if_it_looks_like_a_number(value):
    command = Command.parse([f"dataset.path={value}", f"results_dir={value}"])
    assert command == {"dataset": "csv", "dataset.path": value, "results_dir": value}
    assert Command.parse(command.words) == command
    (job,) = jobs_of([f"input={value}"])
    assert Command.parse(job) == {"input": value}


def test_a_tilde_is_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/folder")
    found = settings(["dataset=csv", "dataset.path=~/a.csv", "results_dir=~/results", "dataset.delimiter=~"])
    options = found.dataset.options
    assert (options["path"], options["delimiter"]) == ("/folder/a.csv", "~")
    assert found.results_dir == "/folder/results"


PLAIN = "plain a/b-c.csv a,b , null NULL true False 1 -1 1e3 1_000 inf nan [a] a:b a=b f(x) glob(f*) it's"
QUOTED = "\" ' a'\"b \\ a\\ \\' 'quoted' ~/a.csv ~ été >50K 100% $x # choice(a,b) [ a}"
TEXTS = [
    *(PLAIN + " " + QUOTED).split(),
    *("", " ", "\t", " a ", "a b", "a, b", "{a: 1}", "a\nb"),
]
NUMBERS = [0.1234567, 1e-05, 1e20, 0.1 + 0.2, -0.0, 5.0, float("inf"), 10**20, -3, True, False, None]


@pytest.mark.parametrize("name", ["dataset.target", "dataset.path", "loss.metric"])
def test_a_printed_command_is_read_back_as_the_same_values(name):
    """Each value alone, in a list, and in a mapping; words that are typed as they are stay without quotes."""
    numbers = [None] if name == "dataset.path" else NUMBERS  # a path is text
    for value in [*TEXTS, *numbers, TEXTS, NUMBERS, [], {}, {"a b": TEXTS, "c:d, (e)": {"f": NUMBERS}, 1: 2.5}]:
        command = Command({"dataset": "csv", name: value})
        again = Command.parse(shlex.split(shlex.join(command.words)))
        assert repr(again) == repr(command), command.words
    plain = ["dataset=csv", "dataset.path=daten/1.csv", "hyper.lr=0.001", "losses=[f1,ce]", "loss.beta={dog:0.25}"]
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


@pytest.mark.parametrize(
    "words, section, option",
    [
        ("dataset=caltech256 preset=paper", "dataset", ("size", 224)),
        ("dataset=caltech256 preset=paper dataset.size=32", "dataset", ("size", 32)),
        ("dataset=cifar10 preset=half", "model", ("width", 0.5)),
        ("dataset=cifar10 preset=half model.width=0.25", "model", ("width", 0.25)),
        ("dataset=cifar10 preset=half model=tiny_darknet", "model", ("width", 1)),
    ],
)
def test_a_preset_sets_options_of_data_and_network_unless_you_do(words, section, option):
    assert option in getattr(settings(words.split()), section).options.items()


def test_settings_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        settings([]).dataset.name = "changed"


def test_mappings_can_be_values():
    assert settings(["loss=fbeta", "loss.beta={dog: 0.25}"]).loss.options["beta"] == {"dog": 0.25}
    for written in ("loss.parameters={beta: 2}", "loss.parameters.beta=2"):
        found = settings(["loss=metric", "loss.metric=fbeta", written])
        assert found.loss.options["parameters"] == {"beta": 2}
    found = settings(["preset=quick", "search=grid", "protocol.grid.lr=[0.5]", "hyper.batch_size=8", "hyper.dropout=0"])
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
    assert Command.parse(mappings) == Command.parse(keys.split())


@pytest.mark.parametrize(
    "word, extra", [("executor=ray", "ray"), ("executor=submitit", "slurm"), ("logger=wandb", "wandb")]
)
def test_a_missing_extra_is_named_with_its_install_command(word, extra, monkeypatch):
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        settings([word])
    assert install_hint(extra) in str(error.value)


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("dataset/x", "{name: digits}", "expected name: x, as the file is called, got 'digits'"),
        ("dataset/x", "{kind: table}", "expected name: x, as the file is called, got None"),
        ("loss/x", "{name: f1, _target_: east.losses.Dice}", "expected name: x, as the file is called, got 'f1'"),
        ("loss/x", "{name: x}", "loss._target_ is missing: add it to the loss file"),
        ("loss/x", "{name: x, _target_: a.B, trains: foo}", "unknown loss.trains 'foo'. Choices: classical, network"),
        ("loss/x", "{name: x, _target_: a.B, has_temperature: maybe}", "loss.has_temperature"),
        ("protocol/x", "{name: x, model: {table: mlp}}", "protocol.grid is missing: add it to the protocol file"),
        ("protocol/x", GRID + "model: {image: mlp}}", "protocol=x names no network for table data: write model=…"),
        ("protocol/x", GRID + "model: {table: mlpp}}", "unknown model 'mlpp', did you mean 'mlp'?"),
        ("protocol/x", GRID + "model: mlp}", "protocol.model"),
        ("search/x", "{name: grid, equl_budget: true}", "unknown key 'search.equl_budget', did you mean 'search.equal"),
        ("preset/x", "preset: {name: y}", "expected name: x, as the file is called, got 'y'"),
    ],
)
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
        "dataset/images-big": "{name: images-big, size: 128}",
        "executor/cluster": "{name: processes, slots: 3}",
        "loss/sharp": "{name: sharp, _target_: east.losses.MetricLoss, metric: fbeta, beta: {dog: 2}, gather: auto}",
    }.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / f"{file}.yaml").write_text(text)
    with pytest.raises(ConfigError, match="did you mean 'sharp'"):
        settings(["loss=sarp", f"config_dir={tmp_path}"])
    own = ["dataset=digits-rare", "executor=cluster", "loss=sharp", "dataset.positive=3", "dataset.limit=100"]
    found = settings([*own, f"config_dir={tmp_path}"])
    assert (found.executor.name, found.executor.slots) == ("processes", 3)
    assert found.dataset.options == {"imbalance": 1.5, "positive": 3}
    assert found.loss.options["beta"] == {"dog": 2}
    assert settings(["dataset=images-big", f"config_dir={tmp_path}"]).dataset.kind == "image", "as its loader gives"
    (tmp_path / "loss" / "f1.yaml").write_text("name: f1\n")
    with pytest.raises(ConfigError, match="already exists"):
        settings(["loss=f1", f"config_dir={tmp_path}"])


@pytest.mark.parametrize("words", ["model.parameters.width=8 model.parameters.deep.b=1",
                                   "model.parameters={width:8,deep:{b:1}}"])  # fmt: skip
def test_empty_mappings_are_filled(words):
    config = settings(["model=custom", "model.target=a.Net", *words.split()])
    assert config.model.options["parameters"] == {"width": 8, "deep": {"b": 1}}


@pytest.mark.parametrize("preset, loss, annealing", [("paper", "f1", "geometric"), ("quick", "ce", "none")])
def test_composing_files_one_by_one_matches_hydra(preset, loss, annealing):
    chosen = {"dataset": "caltech256", "loss": loss, "protocol": "east", "model": "darknet19", "search": "grid"}
    chosen |= {"annealing": annealing, "executor": "ray", "preset": preset, "ensemble": "networks"}
    with initialize_config_dir(str(CONF), version_base="1.3"):
        whole = compose("config", [f"{group}={name}" for group, name in chosen.items()])
    whole = OmegaConf.to_container(whole, resolve=True)
    assert one_by_one(groups(), chosen) == {name: value for name, value in whole.items() if name not in LISTS}
