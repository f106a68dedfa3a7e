"""Train on your own metric: a missed positive costs as much as fifty false alarms.

Any differentiable function of an east.Confusion will do; larger must be better. The one here, saved(), is the share of
the avoidable cost that is avoided: 1 for no errors, 0 for the better of "always" and "never".
"""

import torch
from sklearn.datasets import make_classification
from sklearn.model_selection import train_test_split

from east import Confusion, EASTClassifier

MISSED, FALSE_ALARM = 50.0, 1.0


def saved(c: Confusion) -> torch.Tensor:
    """1 - cost / cost of the best constant decision. Rows of the matrix are true classes, columns predicted."""
    missed, false_alarms = c.actual[..., 1] - c.diagonal[..., 1], c.actual[..., 0] - c.diagonal[..., 0]
    constant = torch.minimum(MISSED * c.actual[..., 1], FALSE_ALARM * c.actual[..., 0])
    return 1 - (MISSED * missed + FALSE_ALARM * false_alarms) / constant.clamp_min(FALSE_ALARM)


def main() -> None:
    X, y = make_classification(6000, 10, n_informative=5, weights=[0.97], class_sep=0.8, flip_y=0.01, random_state=0)
    train_X, test_X, train_y, test_y = train_test_split(X, y, stratify=y, random_state=0)
    for metric in (saved, "f1", "accuracy"):
        model = EASTClassifier(metric, batch_size=1024, max_epochs=40, random_state=0).fit(train_X, train_y)
        confusion = Confusion.from_predictions(
            torch.from_numpy(model.predict(test_X)), torch.from_numpy(test_y), classes=2
        )
        (rejected, alarms), (missed, detected) = confusion.matrix.int().tolist()
        name = metric if isinstance(metric, str) else metric.__name__
        cost = MISSED * missed + FALSE_ALARM * alarms
        print(f"trained for {name:<8}  missed {missed:>3} of {missed + detected}, false alarms {alarms:>4} of "
              f"{alarms + rejected}, cost {cost:.0f}")  # fmt: skip


if __name__ == "__main__":
    main()
