"""What every loss is called with: logits, labels and weights, checked once and brought into one form.

A loss is called as loss(logits, labels, weights=None) and returns one number per leading index, 0-d in ordinary use:
logits [..., n, d] with labels [..., n] for d classes; a single logit z per sample, logits [..., n, 1] or of the labels'
own shape, stands for the two logits (0, z). `anneals` says whether a loss has a temperature that matters.
"""

import inspect
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from east.choices import choose
from east.confusion import check_range
from east.metrics import ratio


class Loss(nn.Module):
    """Checks the input once for all losses, casts to float32 or better, hands over logits [..., n, d], d >= 2."""

    anneals = False

    def forward(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        if not (isinstance(logits, Tensor) and isinstance(labels, Tensor)):
            raise ValueError(f"expected tensors, got logits {type(logits)} and labels {type(labels)}")
        if torch.is_autocast_enabled(logits.device.type):
            with torch.autocast(logits.device.type, enabled=False):
                return self.forward(logits, labels, weights)
        logits, labels = two_or_more_logits(logits, labels)
        if weights is not None:
            weights = checked_weights(weights, labels, logits.dtype)
        try:
            return self.value(logits, labels, weights)
        except (RuntimeError, IndexError):
            # Every loss looks its labels up, which fails outside the range: checking first would cost a pass.
            check_range("labels", labels, logits.shape[-1])
            raise

    def value(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        raise TypeError(f"{type(self).__name__} does not define value(logits, labels, weights)")


def two_or_more_logits(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Checked logits [..., n, d], d >= 2, in float32 or float64, and labels [..., n]."""
    if not logits.is_floating_point() or labels.is_floating_point():
        raise ValueError(
            f"expected floating point logits and integer labels, got logits {logits.dtype} and labels {labels.dtype}"
        )
    single = logits.ndim > 1 and logits.shape[-1] == 1
    if labels.shape == logits.shape or (single and labels.shape == logits.shape[:-1]):
        if single:
            logits, labels = logits.squeeze(-1), labels.reshape(logits.shape[:-1])
        elif logits.ndim > 1:
            refuse_one_hot(labels)
        logits = torch.stack((torch.zeros_like(logits), logits), -1)
    elif labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} do not fit logits of shape {tuple(logits.shape)}: expected "
            f"{tuple(logits.shape[:-1])} for {logits.shape[-1]} classes, or the logits' own shape for single logits"
        )
    if labels.ndim == 0 or labels.numel() == 0:
        raise ValueError(f"expected at least one sample, got logits of shape {tuple(logits.shape)}")
    if labels.dtype != torch.int64:
        labels = labels.long()
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    return logits, labels


def refuse_one_hot(labels: Tensor) -> None:
    """Labels of the logits' own shape are those of single logits, and rarely meant so if every row has a single 1."""
    if not transformed() and (labels >= 0).all() and (labels.sum(-1) == 1).all():
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} look one-hot: expected class indices, labels.argmax(-1); "
            "for populations of single logits give logits as [..., n, 1]"
        )


def checked_weights(weights: Tensor, labels: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights [..., n] of the samples; with single logits [..., n, 1] also of that shape."""
    if weights.shape not in (labels.shape, (*labels.shape, 1)):
        raise ValueError(f"weights: expected the labels' shape {tuple(labels.shape)}, got {tuple(weights.shape)}")
    return weights.reshape(labels.shape).to(dtype)


def transformed() -> bool:
    """Whether torch.compile or a torch.func transform is tracing: data-dependent steps must be left out."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def refuse_unknown(kind: str, given: Iterable[str], accepted: Sequence[inspect.Parameter]) -> None:
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted):
        for name in given:
            choose(kind, name, [parameter.name for parameter in accepted])


def binary_only(loss: nn.Module, logits: Tensor, labels: Tensor) -> None:
    """Checks labels as well, since such losses compute with them where others look up."""
    if logits.shape[-1] != 2:
        raise ValueError(f"{type(loss).__name__}: expected two classes or a single logit, got {logits.shape[-1]}")
    if not transformed():
        check_range("labels", labels, 2)


def mean_over_samples(values: Tensor, weights: Tensor | None) -> Tensor:
    """Mean [...] of values [..., n], weighted where weights are given."""
    return values.mean(-1) if weights is None else ratio((values * weights).sum(-1), weights.sum(-1))
