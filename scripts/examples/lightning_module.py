"""A Lightning module that trains on the metric it is judged by, and a callback that finds the decision rule for it.

The module lowers the temperature after every epoch. `FindRule` collects what validation_step returns, finds the best
rule with east.decide at the end of validation, and keeps it in the checkpoint, beside the weights it belongs to.
"""

import logging
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from east import Confusion, MetricLoss, decide
from east.decisions import Decision, from_json
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

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> tuple[Tensor, Tensor]:
        """Probabilities and labels, for FindRule."""
        x, y = batch
        return self.net(x).squeeze(1).sigmoid(), y

    def on_train_epoch_end(self) -> None:
        if isinstance(self.loss, MetricLoss):
            self.loss.temperature = self.loss.temperature * COOLING

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class FindRule(lightning.Callback):
    """The decision rule for a metric, found on the validation rows; Lightning stores `state_dict` in the checkpoint."""

    def __init__(self, metric: str = "f1"):
        self.metric, self.decision, self.batches = metric, None, []

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.batches.append([part.detach().cpu() for part in outputs])

    def on_validation_epoch_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        probabilities, labels = (torch.cat(parts) for parts in zip(*self.batches, strict=True))
        self.batches = []
        if not trainer.sanity_checking and labels.any():
            self.decision = decide(probabilities, self.metric, labels.long())

    def state_dict(self) -> dict[str, Any]:
        found = self.decision
        return {} if found is None else {"rule": found.rule.to_json(), "value": found.value, "classes": found.classes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.decision = Decision(from_json(state["rule"]), state["value"], state["classes"]) if state else None


def rule_of(checkpoint: Path) -> Decision:
    """The rule that FindRule has stored in a checkpoint."""
    callback = FindRule()
    callback.load_state_dict(torch.load(checkpoint, weights_only=True)["callbacks"][callback.state_key])
    return callback.decision


def rows(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two overlapping clouds; one row in fifteen is positive. Labels are floats, as BCEWithLogitsLoss expects."""
    labels = (torch.rand(count, generator=generator) < 1 / 15).float()
    return torch.randn(count, 2, generator=generator) + 1.2 * labels.unsqueeze(1), labels


def main() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    generator = torch.Generator().manual_seed(0)
    train_set, val_set = (TensorDataset(*rows(4000, generator)) for _ in range(2))
    x, y = rows(4000, generator)
    print(f"{'F1 of the positives':20} {'at 0.5':>8} {'by the rule':>12}")
    for name, loss in (
        ("BCEWithLogitsLoss", nn.BCEWithLogitsLoss()),
        ("MetricLoss", MetricLoss("f1", average="positive")),
    ):
        torch.manual_seed(0)
        module = Classifier(loss)
        trainer = lightning.Trainer(
            max_epochs=EPOCHS, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=FindRule("f1"),
        )  # fmt: skip
        loaders = DataLoader(train_set, batch_size=256, shuffle=True), DataLoader(val_set, batch_size=1000)
        trainer.fit(module, *loaders)
        with tempfile.TemporaryDirectory() as folder:
            trainer.save_checkpoint(file := Path(folder, "last.ckpt"))
            rule = rule_of(file)
        with torch.no_grad():
            probabilities = module.net(x).squeeze(1).sigmoid()
        decided = (probabilities > 0.5).long(), rule.predict(probabilities)
        counts = (Confusion.from_predictions(predicted, y.long(), classes=2) for predicted in decided)
        plain, by_rule = (float(f1(count, average="positive")) for count in counts)
        print(f"{name:20} {plain:8.3f} {by_rule:12.3f}")


if __name__ == "__main__":
    main()
