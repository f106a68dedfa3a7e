"""Mammography: 11,183 microcalcification candidates, 6 features, 260 malignant (2.32 %)."""

import numpy as np
import torch

from east.lab.data.common import Table
from east.lab.data.sources import Dataset, File, Root, fetch

CSV = File(
    "mammography/mammography.csv",
    "sha256:7d3dea3f075f30bbdbb8980e7725684059b4fe3d0f850fadd0f635f6993d8730",
    url="https://raw.githubusercontent.com/jbrownlee/Datasets/master/mammography.csv",
)


def mammography(root: Root = None) -> Table:
    """6 features without a header; the last column is '1' (malignant) or '-1', quotes included."""
    path = fetch(CSV, root=root)
    rows = np.loadtxt(path, delimiter=",", quotechar="'")
    return Table(
        features=torch.tensor(rows[:, :6], dtype=torch.float32),
        labels=torch.tensor(rows[:, 6] == 1, dtype=torch.int64),
        classes=("benign", "malignant"),
        name="mammography",
        positive=1,
        columns=tuple(f"feature_{k}" for k in range(1, 7)),
        source=CSV.url or "",
        path=str(path),
    ).expect(rows=11_183, shape=(6,), positives=260)


DATASETS = {
    "mammography": Dataset(
        load=mammography,
        kind="table",
        about="11,183 rows, 6 features, 260 positive (2.32 %)",
        licence="none stated; research use",
        citation="K. S. Woods et al.: Comparative evaluation of pattern recognition techniques for detection of "
        "microcalcifications in mammography. Int. J. Pattern Recognition and AI 7(6), 1993",
        stored=(CSV.path,),
    )
}
