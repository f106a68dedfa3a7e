"""Several labels per sample: replace one line, BCEWithLogitsLoss(), with MetricLoss(..., multilabel=True)."""

import torch
from sklearn.datasets import make_multilabel_classification
from sklearn.metrics import f1_score
from torch import Tensor, nn

from east import MetricLoss

LOSSES = {
    "BCEWithLogitsLoss": nn.BCEWithLogitsLoss(),
    "MetricLoss f1 macro": MetricLoss("f1", multilabel=True),
    "MetricLoss f1 micro": MetricLoss("f1", multilabel=True, average="micro"),
    "MetricLoss f1 samples": MetricLoss("f1", multilabel=True, average="samples"),
}
AVERAGES = ("macro", "micro", "samples")


def data() -> tuple[Tensor, Tensor]:
    """2,000 rows with 20 features and 12 labels; a row has two of them on average."""
    x, y = make_multilabel_classification(2000, n_features=20, n_classes=12, n_labels=2, random_state=0)
    x = torch.tensor(x, dtype=torch.float32)
    return (x - x.mean(0)) / x.std(0), torch.tensor(y, dtype=torch.float32)


def trained(loss: nn.Module, x: Tensor, y: Tensor) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 12))
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
    for _ in range(12):
        for rows in torch.randperm(len(x)).split(256):
            optimizer.zero_grad()
            loss(net(x[rows]), y[rows]).backward()
            optimizer.step()
    return net


def main() -> None:
    x, y = data()
    print(f"{'trained by':22}" + "".join(f"{'F1 ' + average:>12}" for average in AVERAGES))
    for name, loss in LOSSES.items():
        net = trained(loss, x[:1400], y[:1400])
        with torch.no_grad():
            predicted = net(x[1400:]) > 0
        scores = [f1_score(y[1400:], predicted, average=average, zero_division=0) for average in AVERAGES]
        print(f"{name:22}" + "".join(f"{score:12.3f}" for score in scores))


if __name__ == "__main__":
    main()
