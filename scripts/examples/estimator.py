"""EASTClassifier in a scikit-learn pipeline: numeric and categorical columns, a search over the metric, a test set."""

import numpy as np
import pandas as pd
from sklearn.compose import make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.metrics import f1_score
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder

from east import EASTClassifier


def customers(rows: int = 2000, seed: int = 0) -> tuple[pd.DataFrame, pd.Series]:
    """Customers and whether they cancel; about one in eight does. Some ages are missing."""
    random = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "age": random.normal(45, 15, rows).round(),
            "months": random.exponential(24, rows).round(),
            "plan": random.choice(["basic", "family", "pro"], rows, p=[0.6, 0.3, 0.1]),
        }
    )
    risk = -2.2 - 0.06 * frame["months"] + 0.03 * (45 - frame["age"]) + 2.5 * (frame["plan"] == "basic")
    cancels = pd.Series(np.where(random.random(rows) < 1 / (1 + np.exp(-risk)), "cancels", "stays"))
    frame.loc[random.random(rows) < 0.05, "age"] = np.nan
    return frame, cancels


def main() -> None:
    X, y = customers()
    train_X, test_X, train_y, test_y = train_test_split(X, y, stratify=y, random_state=0)
    columns = make_column_transformer(
        (SimpleImputer(strategy="median", add_indicator=True), ["age", "months"]), (OneHotEncoder(), ["plan"])
    )
    classifier = EASTClassifier(members=4, folds=2, max_epochs=20, random_state=0)
    search = GridSearchCV(
        make_pipeline(columns, classifier),
        {"eastclassifier__metric": ["f1", "mcc", "balanced_accuracy"]},
        scoring="f1_macro",
        cv=3,
    ).fit(train_X, train_y)
    best = search.best_params_["eastclassifier__metric"]
    print(f"chosen by cross-validation: metric={best!r}, macro F1 {search.best_score_:.3f}")
    print(f"on test: macro F1 {f1_score(test_y, search.predict(test_X), average='macro'):.3f}")


if __name__ == "__main__":
    main()
