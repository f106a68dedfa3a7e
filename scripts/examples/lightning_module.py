"""A Lightning module that trains on the metric it is judged by and lowers the temperature after every epoch."""

import logging
import warnings

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from east import Confusion, MetricLoss
from east.metrics import f1

EPOCHS, COOLING = 5, 0.7


class Classifier(lightning.LightningModule):
    def __init__(self, loss: nn.Module):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1))
        self.loss = loss

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        return self.loss(self.net(x).squeeze(1), y)

    def on_train_epoch_end(self) -> None:
        if isinstance(self.loss, MetricLoss):
            self.loss.temperature = self.loss.temperature * COOLING

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def rows(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two overlapping clouds; one row in fifteen is positive. Labels are floats, as BCEWithLogitsLoss expects."""
    labels = (torch.rand(count, generator=generator) < 1 / 15).float()
    return torch.randn(count, 2, generator=generator) + 1.5 * labels.unsqueeze(1), labels


def main() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    generator = torch.Generator().manual_seed(0)
    train_set, (x, y) = TensorDataset(*rows(4000, generator)), rows(4000, generator)
    print(f"{'trained by':20} {'F1 of the positives':>20}")
    for name, loss in (
        ("BCEWithLogitsLoss", nn.BCEWithLogitsLoss()),
        ("MetricLoss", MetricLoss("f1", average="positive")),
    ):
        torch.manual_seed(0)
        module = Classifier(loss)
        trainer = lightning.Trainer(
            max_epochs=EPOCHS, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, DataLoader(train_set, batch_size=256, shuffle=True))
        with torch.no_grad():
            predicted = (module.net(x).squeeze(1) > 0).long()
        score = f1(Confusion.from_predictions(predicted, y.long(), classes=2), average="positive")
        print(f"{name:20} {float(score):20.3f}")


if __name__ == "__main__":
    main()
