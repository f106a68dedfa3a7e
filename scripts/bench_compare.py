"""task=compare on ten kinds of tables, judged on 50,000 rows it never saw, beside what a careful user writes by hand.

    python scripts/bench_compare.py --draws 5 --output results/bench_compare.csv      # resumes; then prints the table

The rule was fixed before task=compare was rebuilt on cross-fitting. Ten generators, five draws each, four scores: F1
(macro with more than two classes), MCC, balanced accuracy and a cost matrix (a missed positive costs 10, a false alarm
1; with many classes an error costs the distance of the class numbers). A draw makes a file and 50,000 fresh rows; fresh
groups are new ones and fresh times later ones. A peer is LogisticRegression, HistGradientBoosting or RandomForest with
scikit-learn's settings, in TunedThresholdClassifierCV for the same score (many classes: argmax), fitted on all rows of
the file. Costs are shown as the share saved of the cheapest constant decision. Asked for: the mean over draws is more
than 0.01 behind the best peer's mean in at most four of forty cells, the mean over all cells is ahead of the mean of
the best peers, and the promised 95 % interval holds the fresh score in at least nine of ten runs.
"""

import argparse
import contextlib
import io
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn.compose import make_column_selector as columns
from sklearn.compose import make_column_transformer
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score, confusion_matrix, f1_score, make_scorer, matthews_corrcoef
from sklearn.model_selection import TunedThresholdClassifierCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, StandardScaler

FRESH = 50_000
Random = np.random.Generator


# A generator takes the random numbers of the world (which a draw's file and its fresh rows share), those of the rows,
# their number, and whether they are fresh. The class is the column y.


def labels(random: Random, z: np.ndarray) -> np.ndarray:
    """0 or 1, with the log odds z."""
    return (random.random(len(z)) < 1 / (1 + np.exp(-z))).astype(int)


def numeric(X: np.ndarray, y: np.ndarray) -> pd.DataFrame:
    return pd.DataFrame(X.round(4), columns=[f"x{k}" for k in range(X.shape[1])]).assign(y=y)


def mixed(world: Random, random: Random, n: int, fresh: bool) -> pd.DataFrame:
    """Skewed numbers, gaps, dates and categories of 5, 12 and 30 names."""
    effects = [world.normal(0, 1, levels) for levels in (5, 12, 30)]
    codes = [random.choice(len(e), n, p=(w := 1 / np.arange(1, len(e) + 1)) / w.sum()) for e in effects]
    amount, age, other = random.lognormal(3, 1, n), random.normal(45, 15, n), random.normal(0, 1, (n, 4))
    days = random.integers(0, 900, n)
    z = 0.8 * (np.log(amount) - 3) - 0.03 * np.abs(age - 45) + 0.8 * other[:, 0] * other[:, 1] + 0.001 * days - 1.6
    z += sum(e[c] for e, c in zip(effects, codes, strict=True))
    frame = numeric(other, labels(random, z)).assign(amount=amount.round(2), age=age.round())
    frame[["region", "branch", "product"]] = np.stack(
        [np.char.add(f"k{j}_", c.astype(str)) for j, c in enumerate(codes)], 1
    )
    frame["opened"] = (pd.Timestamp("2022-01-01") + pd.to_timedelta(days, "D")).strftime("%Y-%m-%d")
    frame.loc[random.random(n) < 0.1, "amount"] = np.nan
    return frame


def rare(world: Random, random: Random, n: int, fresh: bool) -> pd.DataFrame:
    """About 2 % positives that depend on thresholds and products."""
    X, w = random.normal(0, 1, (n, 12)), world.normal(0, 0.7, 12)
    z = X @ w + 1.5 * (X[:, 0] > 1) * (X[:, 1] > 0) + 0.8 * X[:, 2] * X[:, 3] - 7
    return numeric(X, labels(random, z))


def wide(world: Random, random: Random, n: int, fresh: bool) -> pd.DataFrame:
    """2,000 columns, half of them sparse, of which 30 matter."""
    X = random.normal(0, 1, (n, 2000)).astype(np.float32)
    X[:, 1000:] *= random.random((n, 1000)) < 0.1
    w = np.zeros(2000)
    w[world.choice(2000, 30, replace=False)] = world.normal(0, 0.9, 30)
    return numeric(X, labels(random, X @ w - 0.8))


def grouped(world: Random, random: Random, n: int, fresh: bool) -> pd.DataFrame:
    """15 rows per patient, who has features and a risk of his own; fresh patients are new."""
    patient = np.arange(n) // 15
    own, risk = random.normal(0, 1, (n // 15 + 1, 6)), random.normal(0, 2, n // 15 + 1)
    X = np.hstack([own[patient] + random.normal(0, 0.1, (n, 6)), random.normal(0, 1, (n, 4))])
    frame = numeric(X, labels(random, X @ world.normal(0, 0.5, 10) + risk[patient] - 1))
    return frame.assign(patient=np.char.add("fresh" if fresh else "p", patient.astype(str)))


def drifting(world: Random, random: Random, n: int, fresh: bool) -> pd.DataFrame:
    """Weights that turn with time; fresh rows come after the last one of the file."""
    t = 1 + 0.15 * random.random(n) if fresh else np.sort(random.random(n))
    X, first, last = random.normal(0, 1, (n, 10)), world.normal(0, 0.7, 10), world.normal(0, 0.7, 10)
    z = (X @ first) * np.cos(np.pi / 2 * t) + (X @ last) * np.sin(np.pi / 2 * t) - 1 - 0.5 * t
    date = pd.Timestamp("2020-01-01") + pd.to_timedelta((1000 * t).astype(int), "D")
    return numeric(X, labels(random, z)).assign(date=date.strftime("%Y-%m-%d"))


def duplicated(world: Random, random: Random, n: int, fresh: bool) -> pd.DataFrame:
    """Every row of the file five times."""
    distinct = n if fresh else n // 5
    X = random.normal(0, 1, (distinct, 8))
    frame = numeric(X, labels(random, X @ world.normal(0, 0.5, 8) - 1))
    return frame if fresh else pd.concat([frame] * 5).sample(frac=1, random_state=0)


def many(world: Random, random: Random, n: int, fresh: bool) -> pd.DataFrame:
    """Twelve classes of unequal size, two clusters each."""
    share = 1 / np.arange(1, 13)
    y = random.choice(12, n, p=share / share.sum())
    centres = world.normal(0, 1.1, (12, 2, 10))
    return numeric(centres[y, random.integers(0, 2, n)] + random.normal(0, 1, (n, 10)), y)


def excel(world: Random, random: Random, n: int, fresh: bool) -> pd.DataFrame:
    """The sheet `data` of a workbook that begins with notes."""
    return mixed(world, random, n, fresh)


def commas(world: Random, random: Random, n: int, fresh: bool) -> pd.DataFrame:
    """Numbers with decimal commas, between semicolons."""
    X = random.normal(0, 1, (n, 9)) * 10.0 ** np.arange(-1, 2).repeat(3)
    z = np.sin(3 * X[:, 3]) + (X / X.std(0)) @ world.normal(0, 0.6, 9) + np.abs(X[:, 4]) - 2
    return numeric(X, labels(random, z))


def big(world: Random, random: Random, n: int, fresh: bool) -> pd.DataFrame:
    """100,000 rows of 50 columns, with products and steps."""
    X, w = random.normal(0, 1, (n, 50)), world.normal(0, 0.4, 50)
    return numeric(X, labels(random, X @ w + X[:, 0] * X[:, 1] + (X[:, 2] > 0.5) * X[:, 3] - 3.5))


Generator = Callable[[Random, Random, int, bool], pd.DataFrame]
GENERATORS: dict[str, tuple[Generator, int, list[str]]] = {  # rows of the file, and what the command says about it
    "mixed": (mixed, 2000, []),
    "rare": (rare, 5000, []),
    "wide": (wide, 300, []),
    "grouped": (grouped, 1500, ["dataset.group=patient"]),
    "drifting": (drifting, 3000, ["dataset.time=date"]),
    "duplicated": (duplicated, 2000, []),
    "many": (many, 3000, []),
    "excel": (excel, 1200, ["dataset.sheet=data"]),
    "commas": (commas, 1500, []),
    "big": (big, 100_000, []),
}


def drawn(name: str, draw: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The file's rows and 50,000 fresh ones."""
    make, rows, _ = GENERATORS[name]
    seed = [sorted(GENERATORS).index(name), draw]
    parts = ((rows, False, 1), (FRESH, True, 2))
    return tuple(make(np.random.default_rng(seed), np.random.default_rng([*seed, k]), n, f) for n, f, k in parts)


def written(name: str, frame: pd.DataFrame, folder: Path) -> Path:
    """The rows as a file of this kind."""
    path = folder / f"{name}.{'xlsx' if name == 'excel' else 'csv'}"
    if name == "excel":
        with pd.ExcelWriter(path) as book:
            pd.DataFrame({"notes": ["see the sheet data"]}).to_excel(book, sheet_name="notes", index=False)
            frame.to_excel(book, sheet_name="data", index=False)
    else:
        frame.to_csv(path, index=False, **({"sep": ";", "decimal": ","} if name == "commas" else {}))
    return path


# Scores and peers


def costs(classes: int) -> np.ndarray:
    k = np.arange(classes)
    return np.array([[0, 1], [10, 0]]) if classes == 2 else np.abs(k[:, None] - k)


def cost(y: np.ndarray, predicted: np.ndarray) -> float:
    """Minus the mean cost of a row, as task=compare reports it."""
    d = max(2, int(max(y.max(), predicted.max())) + 1)
    return -float((confusion_matrix(y, predicted, labels=range(d)) * costs(d)).sum()) / len(y)


def f1(y: np.ndarray, predicted: np.ndarray) -> float:
    return float(f1_score(y, predicted, average="binary" if y.max() == 1 else "macro", zero_division=0))


SCORES = {"f1": f1, "mcc": matthews_corrcoef, "balanced_accuracy": balanced_accuracy_score, "cost": cost}


def saved_cost(y: np.ndarray, value: float) -> float:
    """The share saved of what the cheapest constant decision costs."""
    return 1 - value / max(cost(y, np.full_like(y, k)) for k in range(y.max() + 1))


def peers(seed: int) -> dict[str, Any]:
    text, number = columns(dtype_exclude=np.number), columns(dtype_include=np.number)
    one_hot = OneHotEncoder(handle_unknown="ignore", min_frequency=5)
    filled = make_pipeline(SimpleImputer(strategy="median"), StandardScaler())
    codes = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1)
    return {
        "logistic": make_pipeline(
            make_column_transformer((one_hot, text), (filled, number)), LogisticRegression(max_iter=2000)
        ),
        "boosting": make_pipeline(
            make_column_transformer((codes, text), ("passthrough", number)),
            HistGradientBoostingClassifier(random_state=seed),
        ),
        "forest": make_pipeline(
            make_column_transformer((one_hot, text), (filled, number)), RandomForestClassifier(random_state=seed)
        ),
    }


def predicted(model: Any, frame: pd.DataFrame) -> np.ndarray:
    """The predictions, a portion at a time: fresh rows of 2,000 columns are large."""
    return np.concatenate([model.predict(frame[k : k + 5000]).astype(int) for k in range(0, len(frame), 5000)])


def features(frame: pd.DataFrame) -> pd.DataFrame:
    """What the peers see: dates as days, and no patient."""
    frame = frame.drop(columns=["y", "patient"], errors="ignore")
    dates = {
        name: pd.to_datetime(frame[name]).astype("int64") / 8.64e13 for name in ("opened", "date") if name in frame
    }
    return frame.assign(**dates)


def of_peers(file: pd.DataFrame, fresh: pd.DataFrame, draw: int) -> list[dict[str, Any]]:
    """Every peer by every score on the fresh rows."""
    X, y, rows = features(file), file["y"].to_numpy(), []
    for name, peer in peers(draw).items():
        fitted = peer.fit(X, y) if y.max() > 1 else None
        for score, function in SCORES.items():
            began = time.perf_counter()
            model = fitted or TunedThresholdClassifierCV(peer, scoring=make_scorer(function)).fit(X, y)
            value = function(fresh["y"].to_numpy(), predicted(model, features(fresh)))
            rows.append({"who": name, "score": score, "value": value, "seconds": time.perf_counter() - began})
    return rows


def of_compare(name: str, file: pd.DataFrame, fresh: pd.DataFrame) -> list[dict[str, Any]]:
    """task=compare by every score on the fresh rows, with the interval that it promised."""
    import east
    from east.lab import cli

    rows, d = [], int(file["y"].max()) + 1
    with tempfile.TemporaryDirectory() as folder:
        path = written(name, file, Path(folder))
        for score, function in SCORES.items():
            began, chosen = time.perf_counter(), [f"score={score}"]
            if score == "cost":
                chosen.append(f"costs={costs(d).tolist()}")
            words = [f"dataset.path={path}", "dataset.target=y", *GENERATORS[name][2], *chosen]
            with contextlib.redirect_stdout(io.StringIO()) as text:
                code = cli.run(["task=compare", *words, f"results_dir={folder}/{score}"])
            if code:
                raise RuntimeError(f"{name}, {score}: exit code {code}\n{text.getvalue()}")
            seconds = time.perf_counter() - began
            (answer,) = Path(folder, score, "compare").iterdir()
            model, told = east.load(answer / "model"), pd.read_csv(answer / "scores.csv").query("winner").iloc[0]
            value = function(fresh["y"].to_numpy(), predicted(model, fresh.drop(columns="y")))
            about = {"low": told.test_low, "high": told.test_high, "winner": told.candidate}
            rows.append({"who": "compare", "score": score, "value": value, "seconds": seconds, **about})
    return rows


def table(results: pd.DataFrame) -> str:
    """The cells as Markdown, and the three things asked for."""
    usual = results.groupby(["generator", "score", "who"])["value"].mean().unstack()
    best = usual[["logistic", "boosting", "forest"]].max(axis=1)
    cells = usual.assign(ahead=usual["compare"] - best).reindex(list(GENERATORS), level=0)
    ours = results[results["who"] == "compare"]
    held = (
        ((ours["low"] <= ours["raw"]) & (ours["raw"] <= ours["high"]))
        .groupby([ours["generator"], ours["score"]])
        .mean()
    )
    seconds = results.groupby(["generator", "score", "who"])["seconds"].mean().unstack()
    cells = cells.assign(held=held, times_boosting=seconds["compare"] / seconds["boosting"])
    lines = ["| table | score | compare | logistic | boosting | forest | ahead | interval holds | time / boosting |"]
    lines += ["|---|---|---:|---:|---:|---:|---:|---:|---:|"]
    for (name, score), row in cells.iterrows():
        four = " | ".join(f"{row[who]:.3f}" for who in ("compare", "logistic", "boosting", "forest"))
        lines.append(f"| {name} | {score} | {four} | {row.ahead:+.3f} | {row.held:.0%} | {row.times_boosting:.1f} |")
    said = (
        f"{int((cells['ahead'] < -0.01).sum())} of {len(cells)} cells more than 0.01 behind the best peer; mean lead "
        f"{cells['ahead'].mean():+.4f}; the promised interval holds in {held.mean():.0%} of runs; "
        f"{ours['draw'].nunique()} draws."
    )
    return "\n".join([*lines, "", said])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=list(GENERATORS), choices=list(GENERATORS))
    parser.add_argument("--output", type=Path, default=Path("results/bench_compare.csv"))
    asked = parser.parse_args()
    done = pd.read_csv(asked.output) if asked.output.exists() else pd.DataFrame(columns=["generator", "draw"])
    for draw in range(asked.draws):
        for name in asked.only:
            if ((done["generator"] == name) & (done["draw"] == draw)).any():
                continue
            file, fresh = drawn(name, draw)
            rows = pd.DataFrame([*of_peers(file, fresh, draw), *of_compare(name, file, fresh)])
            rows = rows.assign(generator=name, draw=draw, raw=rows["value"])
            is_cost = rows["score"] == "cost"
            rows.loc[is_cost, "value"] = [saved_cost(fresh["y"].to_numpy(), v) for v in rows.loc[is_cost, "raw"]]
            done = pd.concat([done, rows], ignore_index=True)
            done.to_csv(asked.output, index=False)
    print(table(done))


if __name__ == "__main__":
    main()
