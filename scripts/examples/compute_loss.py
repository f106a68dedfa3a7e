"""A trainer in the style of Hugging Face: subclass it and override compute_loss; nothing else changes.

`Trainer` here calls compute_loss(model, inputs) as theirs does, so the example does not need transformers. Token logits
are [B, T, C]; the loss expects classes on axis 1. Padding is labelled -100 and ignored.
"""

import torch
from torch import Tensor, nn

from east import Confusion, MetricLoss
from east.metrics import f1

TAGS, WORDS, LENGTH = 4, 60, 12


class Trainer:
    def __init__(self, model: nn.Module, batches: list[dict[str, Tensor]]):
        self.model, self.batches = model, batches

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        logits = model(inputs["input_ids"])
        return nn.functional.cross_entropy(logits.transpose(1, 2), inputs["labels"])

    def train(self, epochs: int = 6) -> None:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-2)
        for _ in range(epochs):
            for inputs in self.batches:
                optimizer.zero_grad()
                self.compute_loss(self.model, inputs).backward()
                optimizer.step()


class MetricTrainer(Trainer):
    loss = MetricLoss("f1")

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        logits = model(inputs["input_ids"])
        return self.loss(logits.transpose(1, 2), inputs["labels"])


class Tagger(nn.Module):
    """Tags each word from the word and its two neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.window = nn.Conv1d(16, TAGS, 3, padding=1)

    def forward(self, words: Tensor) -> Tensor:
        return self.window(self.embedding(words).transpose(1, 2)).transpose(1, 2)


def sentences(count: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Words [B, T] with tags that are mostly 0 and depend on the word before; padding is labelled -100."""
    words = torch.randint(WORDS, (count, LENGTH), generator=generator)
    mixed = words + words.roll(1, 1)
    tags = torch.where(mixed % 10 < 7, 0, 1 + mixed % 3)
    noise = torch.rand(tags.shape, generator=generator) < 0.1
    tags = torch.where(noise, torch.randint(TAGS, tags.shape, generator=generator), tags)
    lengths = torch.randint(4, LENGTH + 1, (count, 1), generator=generator)
    return {"input_ids": words, "labels": tags.masked_fill(torch.arange(LENGTH) >= lengths, -100)}


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    batches, test = [sentences(64, generator) for _ in range(25)], sentences(500, generator)
    print(f"{'trainer':15} {'macro F1 of tags':>17}")
    for kind in (Trainer, MetricTrainer):
        torch.manual_seed(0)
        trainer = kind(Tagger(), batches)
        trainer.train()
        counted = test["labels"] != -100
        with torch.no_grad():
            predicted = trainer.model(test["input_ids"]).argmax(-1)
        confusion = Confusion.from_predictions(predicted[counted], test["labels"][counted], TAGS)
        print(f"{kind.__name__:15} {float(f1(confusion)):17.3f}")


if __name__ == "__main__":
    main()
