"""Files from strangers: text stays text, targets are not imported, and models that cannot work are refused."""

import json
import re

import pytest

from east.experiment import records
from east.reporting import tables
from east.reporting.pages import report
from tests.test_report import GOLDEN, browse

EVIL = "<script>document.title='ran'</script>\"'><img src=x onerror=\"document.title='ran'\">\\input{evil}$%&"


def planted(value):
    """A JSON value with EVIL in place of every string and number below it."""
    if isinstance(value, dict):
        return {name: planted(item) for name, item in value.items()}
    if isinstance(value, list):
        return [planted(item) for item in value]
    return value if value is None or isinstance(value, bool) else EVIL


def source():
    return next(r for r in records.scan(GOLDEN) if r.config.dataset.name == "digits" and r.stage == "trial")


def hostile_results(folder):
    """A record with markup in each of its free texts, one file for every field with markup in its numbers as well, and
    a study's drawing with a script."""
    golden = source()
    config = golden.config.but(preset=EVIL, protocol=golden.config.protocol.but(name=EVIL))
    free = {
        "git": EVIL,
        "device": EVIL,
        "stopped": EVIL,
        "versions": {EVIL: EVIL},
        "data": {"name": EVIL, EVIL: [EVIL]},
    }
    free |= {"decisions": {EVIL: {"scores": {"test": {EVIL: 0.5}}}}, "history": {EVIL: [1.0, 2.0], "val_loss": [1, 2]}}
    file = records.write(folder, golden.but(config=config, source="", **free))
    records.write(folder, golden.but(config=config, seed=1, status="failed", error=EVIL))
    whole = {name: value for name, value in json.loads(file.read_text()).items() if name != "digest"}
    for number, name in enumerate(whole, 100):
        bad = {**whole, name: planted(whole[name])}
        file.with_name(f"seed-{number}.json").write_text(json.dumps(bad))
    (folder / "studies").mkdir()
    drawing = '<svg xmlns="http://www.w3.org/2000/svg">{}</svg>'
    for name, inside in {
        "script": "<script>document.title='ran'</script>",
        "handler": "<g onload=\"document.title='ran'\"/>",
        "link": '<use href="http://example.org/#a"/>',
        "style": "<style>@import 'http://example.org'</style>",
        "good": "<g><path d='M 0 0 L 1 1'/></g>",
    }.items():
        (folder / "studies" / f"{name}.svg").write_text(drawing.format(inside))
    (folder / "studies" / "<script>name.svg").write_text(drawing.format(""))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    hostile_results(folder)
    with pytest.warns(UserWarning, match="not") as recorded:
        text = report.page(folder)
    return folder, text, [str(warning.message) for warning in recorded]


def test_what_a_page_shows_of_a_record_is_text(hostile):
    _, text, warned = hostile
    assert text.count("<script>") == 1, "our own"
    assert "<img" not in text
    assert "&lt;script&gt;" in text
    assert "onload" not in text
    assert any("script.svg is left out: expected a drawing without scripts and links" in line for line in warned)
    assert len([line for line in warned if "is left out" in line]) == 4
    assert "Study: good" in text
    assert any("epochs: expected a valid integer, got" in line for line in warned) or any(
        "others are not records" in line for line in warned
    )


@pytest.mark.slow
def test_nothing_of_it_runs_in_a_browser(hostile, tmp_path):
    page = hostile[1].replace("</body>", "<pre id=found></pre></body>")
    found, console = browse(page, tmp_path)
    assert "ran" not in json.dumps(found)
    assert console == []


def test_text_of_a_record_stays_text_in_latex(hostile):
    text = tables.render("grid", hostile[0], "latex", preset="quick")
    assert not re.search(r"\\input\{evil\}", text)
    assert r"\textbackslash" in text or "evil" not in text
