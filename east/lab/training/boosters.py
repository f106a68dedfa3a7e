"""XGBoost, LightGBM and CatBoost, used only if named: `candidates=[logistic,xgboost]`. None of them is a dependency.

A fitted model is kept as text in the library's own format (JSON, or LightGBM's text), and predicts through the library.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import numpy as np
from torch import get_num_threads

from east.choices import ConfigError, choose
from east.lab.training.classical import Array, Validation

CLASSES = {"xgboost": "XGBClassifier", "lightgbm": "LGBMClassifier", "catboost": "CatBoostClassifier"}
LIBRARIES = tuple(CLASSES)  # a saved model stores the position of its library in here


class Booster:
    """Gradient boosting with a fixed number of trees by xgboost, lightgbm or catboost."""

    def __init__(
        self,
        library: str,
        learning_rate: float = 0.1,
        iterations: int = 200,
        depth: int = 6,
        pca: float | None = 0.8,
    ):
        self.library = choose("library", library, LIBRARIES)
        self.learning_rate, self.iterations, self.depth, self.pca = learning_rate, iterations, depth, pca
        if find_spec(library) is None:
            raise ConfigError(f"{library} is not installed: pip install {library}")

    def fit(self, inputs: Array, labels: Array, classes: int, seed: int = 0, validation: Validation = None) -> Self:
        """inputs [n, f], labels [n] from 0 to classes - 1, some of which may not occur."""
        self.classes = classes
        self.present, renumbered = np.unique(labels, return_inverse=True)
        self.text = b""
        if len(self.present) > 1:
            self.text = to_text(self.library, self.classifier(seed).fit(inputs, renumbered))
        return self

    def classifier(self, seed: int) -> Any:
        """The library's scikit-learn classifier; the four arguments have the same names in all three."""
        threads = get_num_threads()
        options: dict[str, object] = {
            "xgboost": {"n_jobs": threads},
            "lightgbm": {"n_jobs": threads, "num_leaves": min(31, 2**self.depth), "verbose": -1},
            "catboost": {"thread_count": threads, "verbose": False, "allow_writing_files": False},
        }[self.library]
        return getattr(import_module(self.library), CLASSES[self.library])(
            n_estimators=self.iterations,
            learning_rate=self.learning_rate,
            max_depth=self.depth,
            random_state=seed,
            **options,
        )

    def probabilities(self, inputs: np.ndarray) -> np.ndarray:
        """[n, d]; zero for a class that was not in training."""
        return predict(self.library, self.text, self.present, self.classes, inputs)


def predict(library: str, text: bytes, present: np.ndarray, classes: int, inputs: np.ndarray) -> np.ndarray:
    """Probabilities [n, d] of inputs [n, f], by a model in the text format of its library."""
    result = np.zeros((len(inputs), classes))
    if not text:
        result[:, present] = 1.0
        return result
    if find_spec(choose("library", library, LIBRARIES)) is None:
        raise ConfigError(f"this model needs {library}, which is not installed: pip install {library}")
    p = np.asarray(predictor(library, text)(inputs), dtype=np.float64)
    result[:, present] = np.stack((1 - p, p), axis=1) if p.ndim == 1 else p
    return result


def to_text(library: str, model: Any) -> bytes:
    """A fitted classifier as text, through a file, which is all that the libraries write."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "model.json"
        match library:
            case "xgboost":
                model.get_booster().save_model(str(file))
            case "lightgbm":
                model.booster_.save_model(str(file))
            case "catboost":
                model.save_model(str(file), format="json")
        return file.read_bytes()


def predictor(library: str, text: bytes) -> Callable[[np.ndarray], np.ndarray]:
    """A model from `to_text`, as a function from inputs [n, f] to [n] for the second of two classes, or to [n, k]."""
    module = import_module(library)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "model.json"
        file.write_bytes(text)
        match library:
            case "xgboost":
                return module.Booster(model_file=str(file)).inplace_predict
            case "lightgbm":
                return module.Booster(model_file=str(file)).predict
            case _:
                return module.CatBoostClassifier().load_model(str(file), format="json").predict_proba
