"""The committed tables, recomputed from confusion matrices without code of east."""

from collections import defaultdict

import numpy as np
import pytest
import yaml
from scipy import stats

from tests.committed import FILES, content
from tests.recomputed import (
    ROOT,
    holm,
    matrices,
    scored,
    scores_of,
    sign_flip,
    trials,
    welch,
    word,
)  # fmt: skip
from tests.tracked import exported

CONTESTS = [file.stem for file in FILES if file.stem.startswith(("contest", "ensembles"))]
OTHERS = [file.stem for file in FILES if file.stem not in CONTESTS]


@pytest.mark.parametrize("name", OTHERS)
def test_cells_follow_from_their_confusion_matrices(name):
    """Every trial's score; then mean, deviation, Welch's interval with its word, and whether the cell is capped."""
    for shown in content(name)["cells"]:
        if not shown["values"]:
            continue
        done = trials(shown["key"])
        values = dict(
            zip((str(r["seed"]) for r in done), scored(shown["key"], shown["score"], shown["column"]), strict=True)
        )
        assert values == pytest.approx(shown["values"], abs=1e-9)
        ours = list(values.values())
        assert shown["mean"] == pytest.approx(np.mean(ours), abs=1e-9)
        assert shown["capped"] == (2 * sum(r["stopped"] in ("max_epochs", "stage_epochs") for r in done) > len(done))
        if len(ours) > 1:
            assert shown["std"] == pytest.approx(np.std(ours, ddof=1), abs=1e-9)
        if shown["word"]:
            ends = welch(ours, shown["published_mean"], shown["published_std"])
            assert (shown["difference_low"], shown["difference_high"]) == pytest.approx(ends, abs=1e-9)
            assert shown["word"] == word(*ends)


@pytest.mark.parametrize("name", OTHERS)
def test_comparisons_follow_from_the_scores(name):
    """Sign flips of differences over seeds, and Holm's correction of the questions that the table declares."""
    file = ROOT / "conf" / "table" / f"{name.removesuffix('_released')}.yaml"
    declared = yaml.safe_load(file.read_text(encoding="utf-8")).get("questions", [])
    questions = [(block, q["column"], q["row"], q["against"]) for q in declared for block in q["blocks"]]
    answered = {}
    shown = {(c["block"], c["row"], c["column"]): c["values"] for c in content(name)["cells"]}
    for pair in content(name)["comparisons"]:
        block, column, row, against = question = tuple(pair[k] for k in ("block", "column", "row", "against"))
        if question in questions and question not in answered:
            answered[question] = pair
        else:
            assert pair["p_holm"] is None
        if pair["over"] == "seed" and pair["training"] is None:
            ours, theirs = (shown[block, label, column] for label in (row, against))
            differences = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
            assert (pair["n"], pair["difference"]) == (len(differences), pytest.approx(np.mean(differences), abs=1e-9))
            assert pair["p"] == pytest.approx(sign_flip(differences), abs=1e-9)
            if pair["low"] is not None:
                ends = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
                assert (pair["low"], pair["high"]) == pytest.approx(tuple(ends), abs=1e-9)
    unanswered = [1.0] * (len(questions) - len(answered))
    corrected = holm([pair["p"] for pair in answered.values()] + unanswered)[: len(answered)]
    assert [pair["p_holm"] for pair in answered.values()] == pytest.approx(corrected)


@pytest.fixture(scope="module")
def contest():
    """(key, seed) -> rule -> the confusion matrix of the test rows, for the trials of the contest."""
    trials = {}
    for record in exported():
        if (record["config"]["protocol"]["name"], record["stage"]) == ("contest", "trial"):
            rules = {"argmax": record} | record["decisions"]
            trials[record["key"], record["seed"]] = {
                rule: matrices(judged["confusion"]["test"]) for rule, judged in rules.items()
            }
    return trials


@pytest.mark.parametrize("name", CONTESTS)
def test_the_contest_follows_from_its_confusion_matrices(name, contest):
    """Every score of every trial; then leads: mean over splits, minus the reference, t interval over datasets."""
    table = content(name)
    means = defaultdict(dict)
    for shown in table["cells"]:
        rule, _, score = ("argmax." + shown["score"]).rsplit(".", 2)
        rule = rule.rpartition(".")[2]
        scores = [scores_of(contest[shown["key"], int(seed)][rule])[score] for seed in shown["values"]]
        assert list(shown["values"].values()) == pytest.approx(scores, abs=1e-9)
        if scores:
            means[shown["block"], shown["row"]][shown["column"]] = np.mean(scores)
    assert table["rankings"]
    for entry in table["rankings"]:
        reference = means[entry["block"], entry["reference"]]
        for row, lead in entry["leads"]["all"].items():
            ours = means[entry["block"], row]
            differences = [ours[column] - reference[column] for column in entry["columns"]]
            ends = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
            assert (lead["difference"], lead["low"], lead["high"]) == pytest.approx(
                (np.mean(differences), *ends), abs=1e-9
            )
