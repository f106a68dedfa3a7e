"""The texts are current, and their results come from the records by way of scripts/texts.py."""

import importlib.util
import re
from pathlib import Path

import pytest

from east.lab.reporting import papers

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("texts", ROOT / "scripts" / "texts.py")
texts = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(texts)
TEMPLATES = sorted(file for file in texts.TEMPLATES.rglob("*") if file.is_file())

# Not results: settings, limits, data and versions. Code and rows of tables are left out as well.
OTHERS = re.compile(
    r"0\.0+1\b|0\.016\b|0\.02 (?:below|above)|±0\.02|at least 0\.005|p < 0\.05|0\.17 %|beta = 0\.25|\(0\.25 precision|"
    r"0\.0005|16 of the 257|decay 0\.99|arXiv [\d.]+|Py\w+ [23]\.\d\d(?: to 3\.13)?"
)
NUMBER = re.compile(r"(?<![\w.])\d+\.\d\d+|\d+ of (?:the )?\d+")


@pytest.fixture(scope="module")
def numbers():
    return texts.Numbers()


@pytest.mark.slow
def test_texts_are_current(numbers):
    for path, text in texts.render(numbers).items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is not current: run scripts/texts.py"


@pytest.mark.parametrize("file", [f for f in TEMPLATES if f.suffix == ".md"], ids=lambda file: file.name)
def test_a_template_states_no_result(file):
    text = re.sub(r"{{.*?}}|```.*?```", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
    prose = " ".join(line for line in text.splitlines() if line[:1] != "|")
    assert NUMBER.findall(OTHERS.sub("", re.sub(r"`[^`]*`", "", prose))) == []


def test_a_finding_cites_only_published_numbers():
    """Or what follows from them, such as a bound that a published number contradicts."""
    known = {f"{number:.{digits}f}" for c in papers.cells() for number in (c.mean, c.std) for digits in (2, 3)}
    known |= {"0.514", "0.976", "0.980", "0.525", "0.711", "0.82", "0.84", "0.07", "1.76", "0.87"}
    text = re.sub(r"{{.*?}}", "", (texts.TEMPLATES / "east/lab/reporting/findings.yaml").read_text(encoding="utf-8"))
    assert set(re.findall(r"(?<![\w.])\d\.\d{3}\b", text)) <= known


@pytest.mark.slow
class TestWords:
    """What the texts say in words about numbers."""

    def test_never_significantly_ahead_of_a_tuned_threshold(self, numbers):
        for block in texts.FOUR:
            for row, column in texts.MATCHED.items():
                pair = numbers.pair("east_v2_1", block, column, row, "CE + plug-in")
                assert pair.low <= 0 or pair.mean < 0

    def test_which_matched_pairs_are_ahead_and_significantly_behind(self, numbers):
        pairs = numbers.matched()
        assert {place for place, pair in pairs.items() if pair.mean > 0} == {("adult", row) for row in texts.MATCHED}
        assert {place for place, pair in pairs.items() if pair.mean < 0 and pair.p_holm < 0.05} == {
            *((block, "Acc*") for block in ("cocktailparty", "mammography", "kaggle")),
            *((block, "MCC*") for block in ("cocktailparty", "mammography")),
            *((block, "F1*") for block in ("mammography", "kaggle")),
        }

    @pytest.mark.parametrize("block", ["cocktailparty", "mammography"])
    def test_over_stratified_splits_nothing_is_distinguishable_from_zero(self, numbers, block):
        for row in ("F1*", "Metric CE"):
            pair = numbers.pair("splits_stratified", block, "f1_positive", row, over="split")
            assert pair.low < 0 < pair.high

    def test_metric_cross_entropy_matches_a_tuned_threshold_but_on_mammography(self, numbers):
        pairs = [numbers.pair("plugin", b, "f1_positive", "Metric CE", "CE + plug-in") for b in texts.FOUR]
        significant = [block for block, pair in zip(texts.FOUR, pairs, strict=True) if pair.p_holm < 0.05]
        assert significant == ["mammography"]

    def test_three_ways_lead_the_reference_by_the_same(self, numbers):
        rows = ("Metric CE", "CE stopped by its loss + expected", "CE weighted")
        assert len({f"{numbers.lead(row).mean:.3f}" for row in rows}) == 1

    def test_only_metric_cross_entropy_has_both_intervals_above_zero(self, numbers):
        rows = ("Metric CE", "CE stopped by its loss + expected", "CE weighted", "EAST positive", "EAST macro")
        both = [row for row in rows if all(numbers.lead(row, blocks=b).low > 0 for b in (texts.TWO, texts.MANY))]
        assert both == ["Metric CE"]

    def test_dice_on_integer_labels_fits_all_but_one_cell(self, numbers):
        dice = numbers.judged("east_v2_1_released", row="Dice")
        assert [(c.block, c.column) for c in dice if c.gap.word == "differs"] == [("adult", "accuracy")]

    def test_wmw_fits_only_with_the_released_code(self, numbers):
        assert numbers.fitting("btg_1_released", row="WMW") == len(numbers.judged("btg_1_released", row="WMW"))
        assert {c.gap.word for c in numbers.judged("btg_1", row="WMW")} == {"differs"}

    def test_more_than_half_of_mammographys_gap_was_shorter_training(self, numbers):
        full, short = numbers.cell("east_v2_1", "mammography", "CE"), numbers.trials("mammography", "ce", "budget")
        assert 2 * (full.mean - short.mean) > float(full.published[0]) - short.mean
