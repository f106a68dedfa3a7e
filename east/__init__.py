"""Train classifiers on the metric they are judged by. Names are imported on first use, so `import east` is instant."""

from importlib import import_module

__version__ = "0.1.0"

_HOME = {
    "MetricLoss": "east.losses",
    "MetricCrossEntropy": "east.losses",
    "Confusion": "east.confusion",
    "METRICS": "east.metrics",
    "EASTClassifier": "east.estimator",
    "MetricClassifier": "east.metric_classifier",
    "decide": "east.decisions",
    "export": "east.lab.training.export",
    "load": "east.lab.training.saved",
}
_MODULES = ("confusion", "data", "losses", "metrics", "records")
__all__ = [*_HOME]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name in _MODULES:
        return import_module(f"east.{name}")
    raise AttributeError(f"module 'east' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME, *_MODULES])
