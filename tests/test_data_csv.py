"""Your own files: tables of every shape, and folders of images."""

import gzip
import hashlib
import json
import tarfile
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torchvision import transforms

from east.data import DataError, caltech256, encode, load, read, split
from east.data.csv import from_frame


def frame(rows: int = 60) -> pd.DataFrame:
    """Numbers with gaps, words with gaps, postcodes, and a label of which a third is "ill"."""
    return pd.DataFrame(
        {
            "age": [None if k == 0 else 20.0 + k for k in range(rows)],
            "job": [None if k == 1 else ("nurse", "clerk")[k % 2] for k in range(rows)],
            "postcode": [(1010, 2020, 3030)[k % 3] for k in range(rows)],
            "smokes": [k % 4 == 0 for k in range(rows)],
            "state": ["ill" if k % 3 == 0 else "well" for k in range(rows)],
        }
    )


def write(path, table: pd.DataFrame, **options) -> str:
    table.to_csv(path, index=False, **options)
    return str(path)


def test_columns_become_features(tmp_path):
    table = load("csv", path=write(tmp_path / "a.csv", frame()), target="state", categorical=["postcode"])
    assert table.columns == (
        "age",
        "age_missing",
        "job=clerk",
        "job=nurse",
        "job=(missing)",
        "postcode=1010",
        "postcode=2020",
        "postcode=3030",
        "smokes",
    )
    median = np.median(np.arange(21.0, 80.0))
    assert table.features[0].tolist() == [median, 1, 0, 1, 0, 1, 0, 0, 1]  # no age, nurse, 1010, smokes
    assert table.features[1].tolist() == [21, 0, 0, 0, 1, 0, 1, 0, 0]  # 21, no job, 2020
    assert table.features[3].tolist() == [23, 0, 1, 0, 0, 1, 0, 0, 0]  # 23, clerk, 1010
    assert table.classes == ("well", "ill")  # the rarer word is positive
    assert table.positive == 1
    assert table.labels.tolist() == [int(k % 3 == 0) for k in range(60)]


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_any_delimiter_is_found(tmp_path, delimiter):
    table = load("csv", path=write(tmp_path / "a.csv", frame(), sep=delimiter), target="state")
    assert table.fingerprint == load("csv", path=write(tmp_path / "b.csv", frame()), target="state").fingerprint


def test_a_delimiter_inside_quotes_is_none(tmp_path):
    (tmp_path / "a.csv").write_text('"x; y; z; w","b","label"\n' + "1,2,0\n3,4,1\n" * 30)
    assert load("csv", path=str(tmp_path / "a.csv"), target="label").columns == ("x; y; z; w", "b")


def test_rows_longer_than_the_header_do_not_shift(tmp_path):
    path = tmp_path / "a.csv"
    expected = load("csv", path=write(path, frame()), target="state")
    header, *rows = path.read_text().splitlines()
    path.write_text("\n".join([header, *(f"{row}," for row in rows)]))
    assert load("csv", path=str(path), target="state").fingerprint == expected.fingerprint
    for part in (rows, rows[1:]):
        path.write_text("\n".join([header, *(f"{k},{row}" for k, row in enumerate(part))]))
        with pytest.raises(DataError, match=r"a\.csv cannot be read as a table: expected one field per column"):
            load("csv", path=str(path), target="state")


def test_infinity_may_be_a_category():
    table = from_frame("csv", frame().assign(postcode=[1.0, 2.5, np.inf] * 20), "state", ["age", "job"], ["postcode"])
    assert table.columns == ("postcode=1", "postcode=2.5", "postcode=inf", "smokes")


def test_gzip_and_parquet_are_read_alike(tmp_path):
    with gzip.open(tmp_path / "a.csv.gz", "wt") as file:
        frame().to_csv(file, index=False)
    packed = load("csv", path=str(tmp_path / "a.csv.gz"), target="state")
    pytest.importorskip("pyarrow")
    frame().to_parquet(tmp_path / "a.parquet")
    assert load("csv", path=str(tmp_path / "a.parquet"), target="state").fingerprint == packed.fingerprint


def test_options_choose_columns_and_the_positive_class(tmp_path):
    path = write(tmp_path / "a.csv", frame())
    table = load("csv", path=path, target="state", drop=["job", "age"], positive="well")
    assert table.columns == ("postcode", "smokes")
    assert table.classes == ("ill", "well")
    assert table.labels.float().mean() == pytest.approx(2 / 3)


def test_one_column_needs_no_brackets(tmp_path):
    path = write(tmp_path / "a.csv", frame())
    table = load("csv", path=path, target="state", drop="job", categorical="postcode")
    assert table.columns == ("age", "age_missing", "postcode=1010", "postcode=2020", "postcode=3030", "smokes")


def test_column_names_may_be_numbers(tmp_path):
    numbered = frame().set_axis(range(5), axis=1)
    path = write(tmp_path / "a.csv", numbered)
    for drop in (0, [0], ["0"]):
        table = load("csv", path=path, target=4, drop=drop, categorical=[2])
        assert table.columns == ("1=clerk", "1=nurse", "1=(missing)", "2=1010", "2=2020", "2=3030", "3")
        assert table.encoding["target"] == "4"
    np.testing.assert_array_equal(encode(numbered, table.encoding), table.features)


def test_labels_that_are_numbers(tmp_path):
    common = frame().assign(state=[int(k % 3 > 0) for k in range(60)])
    table = load("csv", path=write(tmp_path / "a.csv", common), target="state")
    assert (table.classes, table.positive, int(table.labels.sum())) == (("0", "1"), 1, 40)  # 1, though it is frequent
    many = frame().assign(state=[(2, 10, 1)[k % 3] for k in range(60)])
    table = load("csv", path=write(tmp_path / "b.csv", many), target="state", positive=10)
    assert (table.classes, table.positive) == (("1", "2", "10"), 2)


def test_new_rows_are_encoded_as_in_training():
    table = from_frame("csv", frame(), "state", categorical=["postcode"])
    encoding = json.loads(json.dumps(table.encoding))
    np.testing.assert_array_equal(encode(frame(), encoding), table.features)
    new = pd.DataFrame(
        {"postcode": [3030, 9999], "smokes": [True, False], "job": ["nurse", "pilot"], "age": [30, None]}
    )
    np.testing.assert_array_equal(
        encode(new.assign(extra="ignored"), encoding),
        [[30, 0, 0, 1, 0, 0, 0, 1, 1], [50, 1, 0, 0, 0, 0, 0, 0, 0]],  # what training never saw is all 0
    )


def test_numbers_with_a_stray_text_among_few_are_categories():
    table = from_frame(
        "csv", frame().assign(job=["0", "1", "2", "3+"] * 15), "state", drop=["age", "postcode", "smokes"]
    )
    assert table.columns == ("job=0", "job=1", "job=2", "job=3+")
    assert encode(pd.DataFrame({"job": [2, 0]}), table.encoding).tolist() == [[0, 0, 1, 0], [1, 0, 0, 0]]
    assert encode(pd.DataFrame({"job": [2, 4]}), table.encoding).tolist() == [[0, 0, 1, 0], [0, 0, 0, 0]]
    assert encode(pd.DataFrame({"job": [None]}), table.encoding).tolist() == [[0, 0, 0, 0]]


def test_numbers_that_lost_their_zeros_are_not_taken_for_new_categories():
    table = from_frame("csv", frame().assign(job=["01", "02", "2A"] * 20), "state")
    with pytest.raises(DataError, match=r"job \(expected text, got int64\)"):
        encode(frame().assign(job=[1, 2, 3] * 20), table.encoding)


@pytest.mark.parametrize("categorical, expected", [(None, [[1], [0], [0]]), ("smokes", [[0, 1], [1, 0], [0, 0]])])
def test_a_blank_among_true_and_false_is_a_missing_value(tmp_path, categorical, expected):
    table = from_frame("csv", frame(), "state", ["age", "job", "postcode"], categorical)
    (tmp_path / "new.csv").write_text("smokes,note\nTrue,1\nFalse,2\n,3\n")
    assert encode(read(tmp_path / "new.csv"), table.encoding).tolist() == expected


def test_new_rows_that_do_not_fit_are_refused_by_name():
    encoding = from_frame("csv", frame(), "state").encoding
    with pytest.raises(DataError, match=r"columns are missing: age, job\. Found: postcode, smokes, state"):
        encode(frame().drop(columns=["age", "job"]), encoding)
    with pytest.raises(
        DataError, match=r"do not fit.*age \(expected numbers, got .*\), job \(expected text, got int64\)"
    ):
        encode(frame().assign(age="old", job=3), encoding)
    with pytest.raises(DataError, match=r"age \(infinite values\)"):
        encode(frame().assign(age=-1e300), encoding)


@pytest.mark.parametrize(
    "change, options, message",
    [
        ({}, {"target": "stat"}, r"unknown column 'stat', did you mean 'state'\?"),
        ({}, {"drop": ["jobs"]}, r"unknown column 'jobs', did you mean 'job'\?"),
        ({}, {"positive": "sick"}, r"unknown class of 'state' 'sick'.*Choices: ill, well"),
        ({"state": "ill"}, {}, r"'state' needs at least two classes, found only 'ill'"),
        (
            {"state": [None, "ill", "well"] * 20},
            {},
            r"20 of 60 rows have no label in 'state' \(rows 1, 4, 7, 10, 13, …\)",
        ),
        ({"state": ["None", "ill", "well"] * 20}, {}, r"have no label.*None and null mean.*rename a class"),
        ({"state": [0.0, 1.0, np.inf] * 20}, {}, r"the target 'state' has infinite values"),
        ({"state": np.arange(60) / 7}, {}, r"'state' has 60 different values in 60 rows"),
        ({"job": [f"person {k}" for k in range(60)]}, {}, r"(?s)drop.*column 'job' is text with 60 different values"),
        (
            {"job": [*range(58), "twelve", "dozen"]},
            {},
            r"column 'job' has numbers, but also 2 texts such as 'twelve'",
        ),
        ({"age": None}, {}, r"column 'age' is empty"),
        ({"age": [np.inf] * 60}, {}, r"column 'age' has infinite values"),
    ],
)
def test_unusable_files_say_why(tmp_path, change, options, message):
    path = write(tmp_path / "a.csv", frame().assign(**change))
    with pytest.raises(DataError, match=message) as caught:
        load("csv", **{"path": path, "target": "state", **options})
    assert str(caught.value).startswith(path)
    assert len(str(caught.value).splitlines()) <= 3


def test_header_without_rows(tmp_path):
    with pytest.raises(DataError, match="needs at least two classes, found no rows"):
        load("csv", path=write(tmp_path / "a.csv", frame(0)), target="state")


def test_missing_empty_and_binary_files(tmp_path):
    with pytest.raises(DataError, match=r"dataset.path=FILE and dataset.target=COLUMN"):
        load("csv")
    with pytest.raises(DataError, match="there is no file"):
        load("csv", path=str(tmp_path / "a.csv"), target="state")
    for content in (b"", b"\x89PNG\r\n\xff\xfe\x00\x01", b"a,b\n1,2\n1,2,3,4\n"):
        (tmp_path / "a.csv").write_bytes(content)
        with pytest.raises(DataError, match=r"a\.csv cannot be read as a table"):
            load("csv", path=str(tmp_path / "a.csv"), target="b")


@pytest.fixture
def photographs(tmp_path, monkeypatch):
    """Two classes of noise, 12 wide and 8 high ones, in every colour mode; and an empty cache."""
    monkeypatch.setattr("pooch.os_cache", lambda name: tmp_path / "cache")
    monkeypatch.delenv("EAST_DATA_DIR", raising=False)
    random = np.random.RandomState(0)
    for name, count, size in (("cat", 12, (40, 60)), ("dog", 8, (50, 40))):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for k in range(count):
            image = Image.fromarray(random.randint(0, 256, (*size, 3), dtype=np.uint8))
            image.convert(("RGB", "L", "RGBA", "P")[k % 4]).save(tmp_path / "photos" / name / f"{k:02}.png")
    return tmp_path / "photos"


def test_image_folder(photographs):
    images = load("images", path=str(photographs), size=16)
    assert (images.classes, images.positive) == (("cat", "dog"), 1)  # the rarer one is positive
    assert images.labels.tolist() == [0] * 12 + [1] * 8
    resize = transforms.Compose([transforms.Resize(16), transforms.CenterCrop(16), transforms.PILToTensor()])
    expected = resize(Image.open(photographs / "dog" / "00.png"))
    assert torch.equal(images.pixels[12], expected)
    assert load("images", path=str(photographs), size=16, positive="cat").classes == ("dog", "cat")


def test_changed_image_folder_is_decoded_again(photographs):
    first = load("images", path=str(photographs), size=16)
    (photographs / "cat" / "00.png").unlink()
    second = load("images", path=str(photographs), size=16)
    assert (len(first.labels), len(second.labels)) == (20, 19)
    assert first.fingerprint != second.fingerprint


def test_broken_images_are_named_and_nothing_is_cached(photographs):
    whole = (photographs / "cat" / "00.png").read_bytes()
    (photographs / "cat" / "00.png").write_bytes(whole[: len(whole) // 2])
    (photographs / "dog" / "01.png").write_bytes(b"not an image")
    with pytest.raises(
        DataError, match=r"(?s)^2 of 20 images cannot be read. Repair or delete.*cat/00.png.*dog/01.png"
    ):
        load("images", path=str(photographs), size=16)
    assert list(photographs.parent.glob("cache/**/*.npy")) == []


def caltech_archive(folder, monkeypatch, evil: str | None = None):
    """An archive in Caltech-256's layout in the cache, with dogs, frogs and a file that is no picture."""
    archive = folder.parent / "cache" / caltech256.TAR.path
    archive.parent.mkdir(parents=True)
    with tarfile.open(archive, "w") as box:
        for number, name in (("056.dog", "dog"), ("080.frog-101", "cat")):
            for k, path in enumerate(sorted((folder / name).iterdir())):
                Image.open(path).convert("RGB").save(folder.parent / "photo.jpg")
                box.add(folder.parent / "photo.jpg", f"256_ObjectCategories/{number}/{number[:3]}_{k:04}.jpg")
        box.add(folder.parent / "photo.jpg", "256_ObjectCategories/056.dog/RENAME2")
        if evil:
            box.add(folder.parent / "photo.jpg", evil)
    checksum = f"md5:{hashlib.md5(archive.read_bytes()).hexdigest()}"
    monkeypatch.setattr(caltech256, "TAR", replace(caltech256.TAR, checksum=checksum))


def test_caltech256_archive(photographs, monkeypatch):
    caltech_archive(photographs, monkeypatch)
    images = load("caltech256", size=16)
    assert images.classes == ("dog", "frog")
    assert torch.bincount(images.labels).tolist() == [8, 12]
    assert "20 of 30,607 images, 2 of 257 classes" in images.source
    again = load("caltech256", root=photographs.parent / "cache" / "caltech256", size=16)
    assert again.fingerprint == images.fingerprint
    (photographs.parent / "cache" / "caltech256" / "class_counts.csv").write_text("category,images\n056.dog,7\n")
    with pytest.raises(DataError, match=r"056.dog has 8 images, expected 7"):
        load("caltech256", size=16)


def test_caltech256_archive_that_leads_outside(photographs, monkeypatch):
    caltech_archive(photographs, monkeypatch, evil="../../outside.jpg")
    with pytest.raises(DataError, match=r"cannot be unpacked.*outside the destination"):
        load("caltech256", size=16)
    assert not list(photographs.parent.rglob("outside.jpg"))
    assert not list(photographs.parent.rglob("256_ObjectCategories"))


def test_image_folder_without_classes(tmp_path):
    with pytest.raises(DataError, match="is not a folder"):
        load("images", path=str(tmp_path / "nowhere"))
    (tmp_path / "only").mkdir()
    with pytest.raises(DataError, match="with images in each; none in only"):
        load("images", path=str(tmp_path))


def test_images_are_normalised_by_the_training_part(photographs):
    splits = split(load("images", path=str(photographs), size=16))
    seen = splits.prepare(splits.train.inputs)
    assert seen.dtype == torch.float32
    torch.testing.assert_close(seen.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(seen.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-4, rtol=0)
