"""XGBoost, LightGBM and CatBoost, for those who name them: `candidates=[logistic,xgboost]`. None of them is required.

A fitted model is kept as text in the library's own format (JSON, or LightGBM's text), and predicts through the library.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import numpy as np
from torch import get_num_threads

from east.choices import ConfigError, choose

Rows = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Library:
    """How a library fits, writes, reads and predicts. fit: (inputs, labels, booster, seed) -> model."""

    fit: Callable[[np.ndarray, np.ndarray, "Booster", int], Any]
    write: Callable[[Any], bytes]
    read: Callable[[bytes], Any]
    predict: Callable[[Any, np.ndarray], np.ndarray]  # [n] of the second of two classes, or [n, k]


class Booster:
    """Gradient boosting by a library: xgboost, lightgbm or catboost, with a fixed number of trees."""

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

    def fit(
        self, inputs: np.ndarray, labels: np.ndarray, classes: int, seed: int = 0, validation: Rows | None = None
    ) -> Self:
        """inputs [n, f], labels [n] from 0 to classes - 1, some of which may not occur."""
        self.classes = classes
        self.present, numbered = np.unique(labels, return_inverse=True)
        self.text = b""
        if len(self.present) > 1:
            tools = LIBRARIES[self.library]
            self.text = tools.write(tools.fit(inputs, numbered, self, seed))
        return self

    def probabilities(self, inputs: np.ndarray) -> np.ndarray:
        """[n, d]; zero for a class that was not in training."""
        return predicted(self.library, self.text, self.present, self.classes, inputs)


def predicted(library: str, text: bytes, present: np.ndarray, classes: int, inputs: np.ndarray) -> np.ndarray:
    """Probabilities [n, d] of inputs [n, f] by a model that the library has written."""
    result = np.zeros((len(inputs), classes))
    if not text:
        result[:, present] = 1.0
        return result
    tools = LIBRARIES[choose("library", library, LIBRARIES)]
    if find_spec(library) is None:
        raise ConfigError(f"this model needs {library}, which is not installed: pip install {library}")
    p = np.asarray(tools.predict(tools.read(text), inputs), dtype=np.float64)
    result[:, present] = np.stack((1 - p, p), axis=1) if p.ndim == 1 else p
    return result


def fit_lightgbm(inputs: np.ndarray, labels: np.ndarray, asked: Booster, seed: int) -> Any:
    model = import_module("lightgbm").LGBMClassifier(
        n_estimators=asked.iterations,
        learning_rate=asked.learning_rate,
        max_depth=asked.depth,
        num_leaves=min(31, 2**asked.depth),
        random_state=seed,
        n_jobs=get_num_threads(),
        verbose=-1,
    )
    return model.fit(inputs, labels).booster_


def fit_xgboost(inputs: np.ndarray, labels: np.ndarray, asked: Booster, seed: int) -> Any:
    model = import_module("xgboost").XGBClassifier(
        n_estimators=asked.iterations,
        learning_rate=asked.learning_rate,
        max_depth=asked.depth,
        random_state=seed,
        n_jobs=get_num_threads(),
    )
    return model.fit(inputs, labels).get_booster()


def read_xgboost(text: bytes) -> Any:
    model = import_module("xgboost").Booster()
    model.load_model(bytearray(text))
    return model


def fit_catboost(inputs: np.ndarray, labels: np.ndarray, asked: Booster, seed: int) -> Any:
    model = import_module("catboost").CatBoostClassifier(
        iterations=asked.iterations,
        learning_rate=asked.learning_rate,
        depth=asked.depth,
        random_seed=seed,
        thread_count=get_num_threads(),
        verbose=False,
        allow_writing_files=False,
    )
    return model.fit(inputs, labels)


def write_catboost(model: Any) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.json"
        model.save_model(str(file), format="json")
        return file.read_bytes()


def read_catboost(text: bytes) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.json"
        file.write_bytes(text)
        return import_module("catboost").CatBoostClassifier().load_model(str(file), format="json")


LIBRARIES = {
    "xgboost": Library(
        fit_xgboost,
        lambda model: bytes(model.save_raw("json")),
        read_xgboost,
        lambda model, inputs: model.inplace_predict(inputs),
    ),
    "lightgbm": Library(
        fit_lightgbm,
        lambda model: model.model_to_string().encode(),
        lambda text: import_module("lightgbm").Booster(model_str=text.decode()),
        lambda model, inputs: model.predict(inputs),
    ),
    "catboost": Library(
        fit_catboost,
        write_catboost,
        read_catboost,
        lambda model, inputs: model.predict_proba(inputs),
    ),
}
