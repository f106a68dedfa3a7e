"""The baselines that metric losses are compared with: cross-entropy, focal, Dice, WMW, AP-Perf, sigmoidF1."""

from collections.abc import Sequence

import torch
from torch import Tensor

from east.choices import install_hint
from east.confusion import per_class
from east.losses.closed_form import FEW_CLASSES
from east.losses.inputs import IGNORE_INDEX, Loss, Samples, check_binary, is_tracing, mean_over_samples, read_samples
from east.metrics import ratio

MOST_PAIRS = 1 << 26  # of samples, that are compared on a device before the positives are chosen


class ClassWeighted(Loss):
    """A loss with one weight per class, or None; build() replaces "balanced" by n / (d n_k) of the training labels."""

    def __init__(self, class_weights: Sequence[float] | str | None = None, ignore_index: int = IGNORE_INDEX):
        super().__init__(ignore_index)
        if isinstance(class_weights, str):
            raise ValueError(
                f"class_weights: expected numbers, got {class_weights!r}; 'balanced' needs training labels"
            )
        self.class_weights = None if class_weights is None else [float(w) for w in class_weights]
        self.kept: Tensor | None = None  # the weights on the device: an upload in every step would be waited for

    def weights_of(self, labels: Tensor, logits: Tensor) -> Tensor:
        """The class weight [..., n] of each sample."""
        if len(self.class_weights or ()) != logits.shape[-1]:
            raise ValueError(f"class_weights: expected {logits.shape[-1]}, got {len(self.class_weights or ())}")
        if self.kept is None or self.kept.dtype != logits.dtype or self.kept.device != logits.device:
            with torch.inference_mode(False):  # training may follow
                self.kept = logits.new_tensor(self.class_weights)
        return self.kept[labels]


class CrossEntropy(ClassWeighted):
    """Softmax cross-entropy; with class weights the weighted mean, as in torch."""

    def read(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Samples:
        return read_samples(logits, labels, weights, self.ignore_index)  # d copies of each sample would be slow

    def value(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        if labels.is_floating_point():
            return self.soft_target_value(logits, labels, weights)
        values = -log_likelihood(logits, labels)
        if self.class_weights is not None:
            class_weights = self.weights_of(labels, logits)
            weights = class_weights if weights is None else class_weights * weights
        return mean_over_samples(values, weights)

    def soft_target_value(self, logits: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        """Mean of -sum_j t_j log p_j for targets t [n, d]; weights are divided by their sum, as for class indices."""
        if weights is not None:
            targets = targets * weights.unsqueeze(-1)
        if self.class_weights is not None:
            targets = targets * self.weights_of(torch.arange(logits.shape[-1], device=logits.device), logits)
        return ratio(-(targets * logits.log_softmax(-1)).sum((-2, -1)), targets.sum((-2, -1)))


class Focal(ClassWeighted):
    """-(1 - p_y)^gamma log p_y, which gives well-classified samples less weight. Lin et al. 2017."""

    def __init__(
        self, gamma: float = 2.0, class_weights: Sequence[float] | str | None = None, ignore_index: int = IGNORE_INDEX
    ):
        super().__init__(class_weights, ignore_index)
        self.gamma = gamma

    def value(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        log_p = log_likelihood(logits, labels)
        values = -((-torch.expm1(log_p)).clamp_min(1e-7) ** self.gamma) * log_p
        if self.class_weights is not None:
            alpha = self.weights_of(labels, logits) / sum(self.class_weights)
            values = values * alpha
        return mean_over_samples(values, weights)


def log_likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    """log p_y [..., n]. With few classes the softmax runs over [..., d, n]: short rows are slow to reduce."""
    if logits.shape[-1] < FEW_CLASSES:
        return logits.mT.log_softmax(-2).gather(-2, labels.unsqueeze(-2)).squeeze(-2)
    return logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


class Dice(Loss):
    """1 - mean over present classes of 2 sum p y / (sum p^2 + sum y^2), sums over the batch. Milletari et al. 2016."""

    def value(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        p = logits.softmax(-1)
        w = torch.ones_like(p[..., 0]) if weights is None else weights
        classes = p.shape[-1]
        overlap = per_class(w * p.gather(-1, labels.unsqueeze(-1)).squeeze(-1), labels, classes)
        actual = per_class(w, labels, classes)
        dice = ratio(2 * overlap, (w.unsqueeze(-1) * p * p).sum(-2) + actual)
        present = (actual > 0).to(p.dtype)
        return 1 - (dice * present).sum(-1) / present.sum(-1).clamp_min(1)


class WMW(Loss):
    """Mean over pairs of max(0, gamma - (p_positive - p_negative))^power: a smooth AUROC. Yan et al. 2003.

    The mean, not the sum, so that its scale does not depend on the batch; 0 if one class is absent.
    """

    def __init__(self, gamma: float = 0.2, power: float = 3.0, ignore_index: int = IGNORE_INDEX):
        super().__init__(ignore_index)
        self.gamma, self.power = gamma, power

    def value(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        check_binary(self, logits)
        return self.over_pairs(logits.softmax(-1)[..., 1], labels == 1, labels == 0, weights)

    def over_pairs(self, scores: Tensor, first: Tensor, second: Tensor, weights: Tensor | None) -> Tensor:
        """Weighted mean over all pairs of a sample in `first` and one in `second`, which are masks [..., n]."""
        weights = torch.ones_like(scores) if weights is None else weights
        if is_tracing() or (not scores.is_cpu and scores.numel() * scores.shape[-1] <= MOST_PAIRS):
            return self.mean_margin(scores, weights * first, scores, weights * second)
        # On a whole split, all n^2 pairs would not fit into memory; its positives are few. Choosing them is free on a
        # CPU; other devices would be waited for.
        trials = zip(*(x.reshape(-1, x.shape[-1]) for x in (scores, weights, first, second)), strict=True)
        means = [self.mean_margin(score[i], w[i], score[j], w[j]) for score, w, i, j in trials]
        return torch.stack(means).reshape(scores.shape[:-1])

    def mean_margin(self, x: Tensor, x_weights: Tensor, y: Tensor, y_weights: Tensor) -> Tensor:
        """Weighted mean of max(0, gamma - (x - y))^power over all pairs of x [..., n] and y [..., m]."""
        margins = (self.gamma - (x.unsqueeze(-1) - y.unsqueeze(-2))).clamp_min(0) ** self.power
        x_shares, y_shares = (ratio(w, w.sum(-1, keepdim=True)) for w in (x_weights, y_weights))
        return (margins * x_shares.unsqueeze(-1) * y_shares.unsqueeze(-2)).sum((-2, -1))


class APPerf(Loss):
    """Adversarial F_beta of the positive class, per sample, solved by the package `ap_perf`. Fathony and Kolter 2020.

    L = (1 - M(Q) + (q - y) z) / n. Q is the distribution over label vectors that maximises L, q its marginals, and M(Q)
    the expected F_beta of the best answer to Q. ADMM finds Q in `max_iter` steps, at a cost cubic in n, so more than
    `block` samples are solved in blocks and their results summed. The package's own layer has the gradient of n L.
    """

    def __init__(self, beta: float = 1.0, max_iter: int = 50, block: int = 20):
        super().__init__()
        try:
            from ap_perf.common_metrics import FBeta
        except ImportError as error:
            raise ValueError(f"ap_perf is not installed: {install_hint('apperf')}") from error
        self.beta, self.max_iter, self.block = beta, max_iter, block
        self.metric = FBeta(beta)
        self.metric.initialize()
        self.metric.enforce_special_case_positive()  # no positives, none predicted: F_beta is 1

    def value(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        check_binary(self, logits)
        if weights is not None and not (weights == 1).all():
            raise ValueError("APPerf: expected no weights and no soft targets; it has no weighted form")
        z = logits[..., 1] - logits[..., 0]
        y = labels.to(z.dtype)
        n = z.shape[-1]
        trials = zip(z.reshape(-1, n), y.reshape(-1, n), strict=True)
        return torch.stack([self.in_blocks(*trial) for trial in trials]).reshape(z.shape[:-1]) / n

    def in_blocks(self, z: Tensor, y: Tensor) -> Tensor:
        """n L of one trial: the sum over its blocks."""
        count = -(-len(z) // self.block)
        blocks = zip(z.tensor_split(count), y.tensor_split(count), strict=True)
        return torch.stack([self.against_adversary(*block) for block in blocks]).sum()

    def against_adversary(self, z: Tensor, y: Tensor) -> Tensor:
        """1 - M(Q) + (q - y) z of one block. Q maximises it, so the dependence of Q on z adds no gradient."""
        if not z.isfinite().all():
            return z.sum() * torch.nan  # the solver would not return
        scores, truth = (t.detach().cpu().double() for t in (z, y))
        # Not `objective`: each of the sums by which it values Q lacks a label (max_sumlargest). Q itself is right.
        solve = self.metric._PerformanceMetric__solve_admm_q
        Q, _ = solve(scores[:, None].repeat(1, len(z)).numpy(), truth.numpy(), max_iter=self.max_iter)
        Q = z.new_tensor(Q)  # [i, k - 1]: probability that sample i is positive and that there are k positives
        return 1 - self.best_answer(Q) + ((Q.sum(1) - y) * z).sum()

    def best_answer(self, Q: Tensor) -> Tensor:
        """M(Q): the largest expected F_beta of any answer.

        An answer that calls l samples positive takes those with the largest gain; l = 0 scores the probability of no
        positives.
        """
        k, square = torch.arange(1, len(Q) + 1, device=Q.device), self.beta**2
        gains = Q @ ((1 + square) / (square * k[:, None] + k)).to(Q.dtype)
        best_of_size = gains.sort(0, descending=True).values.cumsum(0).diagonal()
        return torch.maximum(best_of_size.max(), 1 - (Q / k).sum())


class SigmoidF1(Loss):
    """1 - macro F1 of S = sigmoid(slope (z + offset)), one class against the rest. Benedict et al. 2021."""

    def __init__(self, slope: float = 1.0, offset: float = 0.0, ignore_index: int = IGNORE_INDEX):
        super().__init__(ignore_index)
        self.slope, self.offset = slope, offset

    def value(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        S = torch.sigmoid(self.slope * (logits + self.offset))
        w = torch.ones_like(S[..., 0]) if weights is None else weights
        diagonal = per_class(w * S.gather(-1, labels.unsqueeze(-1)).squeeze(-1), labels, S.shape[-1])
        actual = per_class(w, labels, S.shape[-1])
        predicted = (w.unsqueeze(-1) * S).sum(-2)
        return 1 - ratio(2 * diagonal, actual + predicted).mean(-1)
