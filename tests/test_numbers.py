"""Our numbers in README.md, docs/, results/README.md and findings.yaml, recomputed from committed confusion matrices.

The code here is independent: it reads results/records directly and imports nothing from east.
"""

import json
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import yaml
from scipy import stats

from tests.tracked import tracked

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "results" / "records"
TABLES = [file for file in tracked("results/tables") if file.suffix == ".json"]
CONTESTS = [file for file in TABLES if file.stem.startswith("contest")]


def scores_of(counts):
    """Score name -> mean over confusion matrices [m, d, d] with true classes in rows."""
    right, actual, predicted = np.diagonal(counts, axis1=1, axis2=2), counts.sum(2), counts.sum(1)
    total = counts.sum((1, 2))
    f1 = 2 * right / np.maximum(actual + predicted, 1)
    spread = [np.sqrt(total**2 - (margin**2).sum(1)) for margin in (actual, predicted)]
    mcc = (right.sum(1) * total - (actual * predicted).sum(1)) / np.maximum(spread[0] * spread[1], 1)
    per_class = {"precision": right / np.maximum(predicted, 1), "recall": right / np.maximum(actual, 1)}
    scores = {"f1_positive": f1[:, 1], "f1_macro": f1.mean(1), "accuracy": right.sum(1) / total, "mcc": mcc}
    present = actual > 0
    scores["gmean"] = np.prod(np.where(present, per_class["recall"], 1), 1) ** (1 / present.sum(1))
    scores |= {f"{name} of {k}": values[:, k] for name, values in per_class.items() for k in range(counts.shape[1])}
    return {name: values.mean() for name, values in scores.items()}


def matrices(stored):
    """[m, d, d] from a record's matrix, several matrices, or nonzero cells."""
    if isinstance(stored, dict):
        dense = np.zeros((stored["classes"], stored["classes"]))
        for row, column, count in stored["cells"]:
            dense[row, column] = count
        stored = dense
    counts = np.asarray(stored, dtype=float)
    return counts[None] if counts.ndim == 2 else counts


@pytest.fixture(scope="module")
def ours():
    """(dataset, loss, protocol, key) -> (rule, score) -> the values of its trials."""
    trials = defaultdict(lambda: defaultdict(list))
    for file in RECORDS.glob("*.jsonl"):
        for record in map(json.loads, file.read_text().splitlines()):
            if (record["stage"], record["status"]) != ("trial", "done"):
                continue
            config = record["config"]
            if config["protocol"]["name"] == "contest":
                continue  # the fixture `contest` reads these
            rules = {"argmax": record} | record["decisions"]
            for rule, judged in rules.items():
                for score, value in scores_of(matrices(judged["confusion"]["test"])).items():
                    names = (config[section]["name"] for section in ("dataset", "loss", "protocol"))
                    trials[*names, record["key"]][rule, score].append(value)
    return trials


def text_of(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    if name.endswith(".yaml"):
        text = " ".join(entry["text"] + " " + entry["evidence"] for entry in yaml.safe_load(text)["findings"])
    return " ".join(text.split())


NAMES = {"cocktailparty": "CocktailParty", "cocktailparty_graph": "graph", "adult": "Adult", "adult_released": "Adult"}
NAMES |= {"mammography": "Mammography", "kaggle": "Kaggle", "cifar10": "CIFAR-10", "caltech256": "Caltech256"}
TEXTS = ["docs/reproduce.md", "results/README.md", "east/reporting/findings.yaml"]


def passages(name):
    """The paragraphs of a text, each after its heading; the findings, each after the datasets of its cells."""
    text = (ROOT / name).read_text(encoding="utf-8")
    if name.endswith(".yaml"):
        for entry in yaml.safe_load(text)["findings"]:
            datasets = {d for cell in entry["cells"] for d in np.atleast_1d(cell.get("dataset", []))}
            yield " ".join([*(NAMES[d] for d in sorted(datasets)), *f"{entry['text']} {entry['evidence']}".split()])
        return
    heading = ""
    for paragraph in re.split(r"\n\s*\n", text):
        heading = paragraph if paragraph.startswith("#") else heading
        yield " ".join(f"{heading} {paragraph}".split())


@pytest.fixture(scope="module")
def shown(ours):
    """(mean, deviation) of the cells of the committed tables, recomputed from matrices -> names of their datasets.

    The published numbers are among them, without a deviation.
    """
    names = defaultdict(set)
    for file in TABLES:
        if file in CONTESTS:
            continue
        for table in json.loads(file.read_text()):
            for cell in table["cells"]:
                dataset = NAMES.get(cell["dataset"], cell["dataset"])
                if cell["published_mean"] is not None:
                    names[f"{cell['published_mean']:.3f}", ""].add(dataset)
                rule, _, score = f"argmax.{cell['score']}".rsplit(".", 2)
                place = next((p for p in ours if p[1] == cell["loss"] and p[3] == cell["key"]), None)
                values = ours[place].get((rule.rpartition(".")[2], score), []) if place else []
                if values:
                    assert sorted(values) == pytest.approx(sorted(cell["values"].values()), abs=1e-9)
                values = values or list(cell["values"].values())  # AUROC, which takes more than a matrix
                if values:
                    deviation = f"{np.std(values, ddof=1):.3f}" if len(values) > 1 else ""
                    names[f"{np.mean(values):.3f}", deviation].add(dataset)
                    names[f"{np.mean(values):.3f}", ""].add(dataset)
    return names


IN_NO_TABLE = {  # settings that a text mentions beside the tables: dataset, loss, score
    "0.548 ± 0.474": ("kaggle", "dice", "f1_positive"),
    "0.633 ± 0.019": ("mammography", "f1", "f1_positive"),
    "0.633": ("mammography", "f1", "f1_positive"),
    "0.599 ± 0.029": ("mammography", "mcc", "f1_positive"),
    "0.837 ± 0.012": ("kaggle", "ce", "f1_positive"),
    "0.728": ("cocktailparty", "mcc", "mcc"),
    "0.882": ("cocktailparty", "accuracy", "accuracy"),
    "0.383": ("caltech256", "f1", "f1_macro"),
    "0.334": ("caltech256", "ce", "f1_macro"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_every_mean_and_deviation_is_that_of_a_cell_of_a_dataset_named_beside_it(name, shown, ours):
    """Our mean and deviation have three decimals each; the papers print deviations with two."""
    stated = [(p, number) for p in passages(name) for number in re.findall(r"\d\.\d{3} ± \d\.\d{3}", p)]
    assert len(stated) > 10
    for passage, number in stated:
        if place := IN_NO_TABLE.get(number):
            values = [by_score["argmax", place[2]] for key, by_score in ours.items() if key[:2] == place[:2]]
            assert number in [f"{np.mean(v):.3f} ± {np.std(v, ddof=1):.3f}" for v in values if len(v) > 1]
        else:
            assert any(dataset in passage for dataset in shown[tuple(number.split(" ± "))]), (number, passage)


NO_MEANS = re.compile(  # numbers with three decimals that are no means: deviations, intervals, p, settings, leads
    r"\d\.\d{3} ± \d\.\d{2,3}|[+−]\d\.\d{3}|p = \d\.\d{3}|by 0\.\d{3} \(|\(−0\.\d{3}, −0\.\d{3} to 0\.000\)|"
    r"`[^`]*`|(at|T =|learning rate|rates?|0\.01,|and) 0\.001\b|at least 0\.005|\(0\.001 and 0\.0001\)|"
    r"is 0\.012 F1 ahead|on Mammography by 0\.001|spreads by .*? 0\.008\)|soft loss on validation rows .*?\)"
)


def test_every_bare_mean_is_that_of_a_cell_of_a_dataset_named_beside_it(shown, ours):
    """Published numbers count as well."""
    for passage in passages("results/README.md"):
        for number in re.findall(r"(?<![\d.])\d\.\d{3}(?!\d)", NO_MEANS.sub("", passage)):
            if place := IN_NO_TABLE.get(number):
                values = [by_score["argmax", place[2]] for key, by_score in ours.items() if key[:2] == place[:2]]
                assert number in [f"{np.mean(v):.3f}" for v in values]
            else:
                assert any(dataset in passage for dataset in shown[number, ""]), (number, passage)


DATASETS = {"Adult, with": "adult_released", "Adult, read": "adult", "Mammography": "mammography", "Kaggle": "kaggle"}
DATASETS |= {"CocktailParty": "cocktailparty"}
LOSSES = {"F1*": "f1", "CE": "ce"}


def headline():
    """The lines of the table in docs/reproduce.md: dataset, loss, published, ours, n, interval, word."""
    dataset = ""
    for line in (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 7 and cells[1] in LOSSES:
            dataset = next((name for label, name in DATASETS.items() if cells[0].startswith(label)), dataset)
            yield (dataset, LOSSES[cells[1]], *cells[2:])


def signed(number):
    return f"{number:+.3f}".replace("-", "−")


def test_the_headline_has_the_datasets_of_the_paper():
    assert {(dataset, loss) for dataset, loss, *_ in headline()} == {
        (dataset, loss) for dataset in DATASETS.values() for loss in LOSSES.values()
    }


@pytest.mark.parametrize("line", list(headline()), ids=lambda line: f"{line[0]} {line[1]}")
def test_the_headline_is_on_record(line, ours):
    """Mean, deviation and n come from one setting's trials; Welch's interval and the word follow their definitions."""
    dataset, loss, published, mean_and_deviation, n, interval, word = line
    fitting = [  # several if a choice made no difference, such as two searches with equal results
        values
        for place, by_score in ours.items()
        if place[:3] == (dataset, loss, "east")
        for values in [by_score["argmax", "f1_positive"]]
        if len(values) == int(n) and f"{np.mean(values):.3f} ± {np.std(values, ddof=1):.3f}" == mean_and_deviation
    ]
    assert fitting
    known, their_deviation = map(float, published.split(" ± "))
    variances = np.var(fitting[0], ddof=1) / int(n), max(their_deviation, 0.005) ** 2 / 10
    freedom = sum(variances) ** 2 / (variances[0] ** 2 / (int(n) - 1) + variances[1] ** 2 / 9)
    difference = np.mean(fitting[0]) - known
    reach = stats.t.ppf(0.975, freedom) * np.sqrt(sum(variances))
    low, high = difference - reach, difference + reach
    assert interval == f"{signed(difference)} [{signed(low)}, {signed(high)}]"
    inside, contains_zero = low >= -0.02 and high <= 0.02, low <= 0 <= high
    words = {(True, True): "reproduced", (True, False): "close", (False, False): "differs", (False, True): "imprecise"}
    assert word == words[inside, contains_zero]


INTERVAL = re.compile(
    r"([+−]?\d\.\d{3}) \[([+−]\d\.\d{3}), ([+−]\d\.\d{3})\]|"
    r"([+−]?\d\.\d{3})(?:,| \((?:95 % interval )?) ?([+−]?\d\.\d{3}) to ([+−]?\d\.\d{3})"
)


def rounded(number):
    return round(float(str(number).replace("−", "-")), 3) + 0.0


def test_every_difference_has_its_own_interval_in_a_committed_table():
    """A difference and the ends of its interval stand together; test_results.py renders the tables from the records."""
    together, alone = set(), set()
    for file in TABLES:
        for table in json.loads(file.read_text()):
            groups = [group for entry in table.get("rankings", ()) for group in entry["leads"].values()]
            intervals = [
                *((c["difference"], c["difference_low"], c["difference_high"]) for c in table["cells"]),
                *((pair["difference"], pair["low"], pair["high"]) for pair in table["comparisons"]),
                *((lead["mean"], lead["low"], lead["high"]) for group in groups for lead in group.values()),
            ]
            together |= {tuple(map(rounded, ends)) for ends in intervals if None not in ends}
            alone |= {rounded(number) for ends in intervals for number in ends if number is not None}
    for name in ("README.md", "docs/reproduce.md", "docs/which_loss.md", "results/README.md"):
        text = text_of(name)
        stated = {tuple(rounded(n) for n in match.groups() if n) for match in INTERVAL.finditer(text)}
        assert stated, name
        assert stated <= together, f"{name}: in no table: {sorted(stated - together)}"
        left = set(re.findall(r"[+−]\d\.\d{3}(?!\d)", INTERVAL.sub("", text)))
        assert {rounded(number) for number in left} <= alone, f"{name}: in no table: {sorted(left)}"


WORDS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
FITTING = (
    r"(\d+) of the (\d+) cells of Bridging the Gap's Table 1 that were run earns it, and (\d+) of the (\d+) of EAST's; "
    r"with the quirks of the released code, (\d+) and (\d+)\. By the formulas (\d+) and (\d+) cells clearly differ; "
    r"with the quirks, (\d+) and (\d+)\..*?contains 0 in (\d+) of Bridging the Gap's 60 cells "
    r"\(in (\d+) of (\d+) without CocktailParty\) and in (\d+) of EAST's (\d+)"
)


def test_the_cells_that_fit_are_counted_right():
    cells = {}
    for name in ("btg_1", "east_v2_1", "btg_1_released", "east_v2_1_released"):
        table = json.loads((ROOT / "results" / "tables" / f"{name}.json").read_text())[0]
        cells[name] = [c for c in table["cells"] if c["published_mean"] is not None and c["mean"] is not None]
    ticked = {name: sum(cell["ticked"] for cell in group) for name, group in cells.items()}
    fits = {
        name: [cell["block"] for cell in group if cell["difference_low"] <= 0 <= cell["difference_high"]]
        for name, group in cells.items()
    }
    others = [cell for cell in cells["btg_1_released"] if cell["block"] != "cocktailparty"]
    expected = [ticked["btg_1"], len(cells["btg_1"]), ticked["east_v2_1"], len(cells["east_v2_1"])]
    expected += [ticked["btg_1_released"], ticked["east_v2_1_released"]]
    expected += [sum(cell["word"] == "differs" for cell in cells[name]) for name in cells]
    expected += [len(fits["btg_1_released"])]
    expected += [sum(block != "cocktailparty" for block in fits["btg_1_released"]), len(others)]
    expected += [len(fits["east_v2_1_released"]), len(cells["east_v2_1_released"])]
    assert [int(number) for number in re.search(FITTING, text_of("results/README.md")).groups()] == expected


WHAT_DECIDES = {
    "README.md": r"\((\w+) pairs of a dataset and a metric.*?plain cross-entropy in (\w+) pair, lost to it "
    r"significantly in (\w+)",
    "results/README.md": r"Table 1 declares (\w+) questions.*?higher mean in (\w+):.*?in (\w+) of them with p < 0.05",
}


@pytest.mark.parametrize("name", WHAT_DECIDES)
def test_the_answers_to_the_questions_of_table_1_are_counted_right(name):
    table = json.loads((ROOT / "results" / "tables" / "east_v2_1.json").read_text())[0]
    answers = [pair for pair in table["comparisons"] if pair["p_holm"] is not None]
    won = sum(pair["difference"] > 0 for pair in answers)
    lost = sum(pair["difference"] < 0 and pair["p_holm"] < 0.05 for pair in answers)
    stated = re.search(WHAT_DECIDES[name], text_of(name)).groups()
    assert [WORDS.index(word) for word in stated] == [len(answers), won, lost]


@pytest.fixture(scope="module")
def contest():
    """(key, seed) -> rule -> the confusion matrix of the test rows, for the trials of the contest."""
    trials = {}
    for file in RECORDS.glob("*.jsonl"):
        for line in file.read_text().splitlines():
            if '"name":"contest"' in line and '"stage":"trial"' in line:
                record = json.loads(line)
                rules = {"argmax": record} | record["decisions"]
                trials[record["key"], record["seed"]] = {
                    rule: matrices(judged["confusion"]["test"]) for rule, judged in rules.items()
                }
    return trials


@pytest.mark.parametrize("file", CONTESTS, ids=lambda file: file.stem)
def test_the_contest_follows_from_its_confusion_matrices(file, contest):
    """Every score of every trial; then leads: mean over splits, minus the reference, t interval over datasets."""
    (table,) = json.loads(file.read_text())
    means = defaultdict(dict)
    for cell in table["cells"]:
        rule, _, score = ("argmax." + cell["score"]).rsplit(".", 2)
        rule = rule.rpartition(".")[2]
        scores = [scores_of(contest[cell["key"], int(seed)][rule])[score] for seed in cell["values"]]
        assert list(cell["values"].values()) == pytest.approx(scores, abs=1e-9)
        if scores:
            means[cell["block"], cell["row"]][cell["column"]] = np.mean(scores)
    assert table["rankings"]
    for entry in table["rankings"]:
        reference = means[entry["block"], entry["reference"]]
        for row, lead in entry["leads"]["all"].items():
            ours = means[entry["block"], row]
            differences = [ours[column] - reference[column] for column in entry["columns"]]
            ends = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
            assert (lead["mean"], lead["low"], lead["high"]) == pytest.approx((np.mean(differences), *ends), abs=1e-9)


METHODS = {
    "metric cross-entropy, most probable class": "Metric CE",
    "metric cross-entropy, tuned rule": "Metric CE + plug-in",
    "metric cross-entropy, rule without labels (`east.decide`)": "Metric CE + expected",
    "metric cross-entropy stopped by its own loss": "Metric CE stopped by its loss",
    "cross-entropy stopped by its own loss, rule without labels (`east.decide`)": "CE stopped by its loss + expected",
    "cross-entropy stopped by its own loss, tuned rule": "CE stopped by its loss + plug-in",
    "cross-entropy stopped by its own loss, most probable class": "CE stopped by its loss",
    "cross-entropy stopped by F1, rule without labels (`east.decide`)": "CE + expected",
    "cross-entropy stopped by F1, most probable class": "CE",
    "class-weighted cross-entropy": "CE weighted",
    "EAST": "EAST",
    "EAST, F1 of the positive class": "EAST positive",
    "EAST, macro F1 as in the paper": "EAST macro",
    "EAST after a cross-entropy warm-up": "EAST after warm-up",
    "gradient boosting, rule without labels": "Boosting + expected",
    "random forest, rule without labels": "Random forest + expected",
}


def leads_in_which_loss():
    """Metric -> row of its table in docs/which_loss.md -> the cells for two and for many classes."""
    shown, metric = defaultdict(dict), ""
    for line in (ROOT / "docs" / "which_loss.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[0].endswith("on held-out datasets"):
            metric = cells[0].partition(" ")[0]
        elif len(cells) == 3 and metric and not cells[0].startswith("---"):
            shown[metric][cells[0]] = cells[1:]
        elif len(cells) != 3:
            metric = ""
    return shown


@pytest.mark.parametrize("metric, name", [("F1", "contest"), ("MCC", "contest_mcc"), ("G-mean", "contest_gmean")])
def test_the_tables_of_which_loss_show_the_contests(metric, name):
    (table,) = json.loads((ROOT / "results" / "tables" / f"{name}.json").read_text())
    leads = {entry["block"]: entry["leads"]["all"] for entry in table["rankings"]}
    blocks = ("held out, two classes", "held out, many classes")
    rows = leads_in_which_loss()[metric]
    assert len(rows) >= 6
    for words, cells in rows.items():
        expected = [leads[block].get(METHODS[words]) for block in blocks]
        assert cells == [
            f"{signed(x['mean'])} [{signed(x['low'])}, {signed(x['high'])}]" if x else "" for x in expected
        ]


def test_what_averaged_weights_change():
    """Means over held-out datasets with and without them; docs/which_loss.md states two rows and counts the rest."""
    with_them, without = (
        {
            (cell["row"], cell["block"], cell["column"]): cell["mean"]
            for cell in json.loads((ROOT / "results" / "tables" / f"{name}.json").read_text())[0]["cells"]
            if cell["block"].startswith("held out")
            and cell["mean"] is not None
            and cell["loss"] not in ("rf", "boosting", "logistic")
        }
        for name in ("contest_averaged", "contest")
    )
    changes = defaultdict(list)
    for place, mean in with_them.items():
        changes[place[0]].append(mean - without[place])
    intervals = {}
    for row, values in changes.items():
        reach = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values))
        intervals[row] = np.mean(values), np.mean(values) - reach, np.mean(values) + reach
    text = text_of("docs/which_loss.md")
    for row in ("CE + plug-in", "Metric CE"):
        mean, low, high = (f"{value:.4f}".replace("-", "−") for value in intervals[row])
        assert re.search(rf"by {mean} for [\w -]+ \((95 % interval )?{low} to {high}\)", text), row
    up, down = sum(low > 0 for _, low, _ in intervals.values()), sum(high < 0 for *_, high in intervals.values())
    assert (len(intervals), up, down) == (39, 2, 1)
    assert "Of the 39 rows of networks, the interval excludes 0 in three, twice upwards and once downwards" in text
