"""The HTML page: complete, self-contained, accessible; and, if chromium is installed, working in it."""

import json
import os
import re
import shutil
import subprocess
from collections import Counter
from datetime import date
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from east.lab.experiment import records
from east.lab.reporting import papers, plots, tables
from east.lab.reporting.pages import html, report
from east.lab.settings.sections import DatasetSection

GOLDEN = Path(__file__).parent / "golden"
SECTIONS = ("held", "own", "tables", "figures", "findings", "records")
VOID = {"meta", "link", "br", "img", "use", "path", "rect"}


class Page(HTMLParser):
    """What the tests need from a page: tags with attributes, headings, text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.headings, self.words = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data):
        self.words.append(data)

    def of(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Golden records of three datasets, and one complete run with history and probabilities."""
    folder = tmp_path_factory.mktemp("results")
    (folder / "records").mkdir()
    for name in ("mammography", "adult_released", "digits"):
        shutil.copy(GOLDEN / "records" / f"{name}.jsonl", folder / "records")
    source = next(r for r in records.scan(GOLDEN) if r.config.dataset.name == "digits")
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 200)
    probabilities = rng.dirichlet(np.ones(10), 200) * 0.5 + 0.5 * np.eye(10)[labels]
    record = records.Record(
        config=source.config.but(hyper=source.config.hyper.but(lr=0.5)),
        seed=0,
        scores=source.scores,
        confusion=source.confusion,
        history={"epoch": [0, 1], "temperature": [0.2, 0.1], "train_loss": [0.5, 0.4], "val_loss": [0.6, 0.5]},
    )
    records.write(folder, record, arrays={"test_probabilities": probabilities, "test_labels": labels})
    return folder


@pytest.fixture(scope="module")
def text(results):
    return report.page(results, today=date(2026, 1, 2))


@pytest.fixture(scope="module")
def page(text):
    return Page(text)


def test_the_page_is_well_formed(page):
    assert page.open == []
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert [name for name, count in Counter(ids).items() if count > 1] == []


def test_the_page_has_all_tables_with_trials_and_all_findings(page, results):
    ids = {attributes.get("id") for _, attributes in page.tags}
    tried = {table.name for table in tables.build_all(results) if any(cell.values for cell in table.cells)}
    assert {"east_v2_1", "btg_1"} <= tried <= ids
    assert {f"f-{finding.id}" for finding in papers.findings()} <= ids
    sections = "".join(page.words)
    untried = {name for name in tables.names() if tables.spec(name).paper} - tried
    assert all(name in sections for name in untried)
    assert "caltech256" not in ids
    assert "Suspected: " in sections
    assert "Confirmed: " in sections


def test_every_link_leads_somewhere(page, results):
    ids = {attributes.get("id") for _, attributes in page.tags}
    targets = [attributes["href"] for attributes in page.of("a")]
    assert len(targets) > 100
    for target in targets:
        assert target[1:] in ids if target.startswith("#") else (results / target).is_file()


def test_every_filled_cell_links_to_its_records(page, results):
    linked = {attributes["href"] for attributes in page.of("a")}
    filled = [cell for table in tables.build_all(results) for cell in table.cells if cell.values]
    assert len(filled) > 20
    assert {f"#k-{cell.key}" for cell in filled} <= linked


def test_the_page_requests_nothing_from_the_network(text, page):
    assert not page.of("img")
    assert not any("src" in attributes for attributes in page.of("script"))
    assert [attributes["href"] for attributes in page.of("link")] == ["data:,"]
    outside = set(re.findall(r'https?://[^"\s<]+', text))
    assert all("www.w3.org" in name for name in outside), "XML namespaces are names, not requests"
    assert "@import" not in text
    assert "url(http" not in text


def test_headings_never_skip_a_level(page):
    assert page.headings[0] == 1
    assert page.headings.count(1) == 1
    assert all(b - a <= 1 for a, b in zip(page.headings, page.headings[1:], strict=False))


def test_tables_have_headers_with_scope_and_regions_have_names(page):
    assert all(attributes.get("scope") in ("row", "col", "colgroup") for attributes in page.of("th"))
    regions = [attributes for attributes in page.of("div") if attributes.get("class") == "scroll"]
    assert len(regions) == len(page.of("table")) > 20
    assert all(attributes["aria-label"] and attributes["tabindex"] == "0" for attributes in regions)


def test_language_title_viewport_and_described_figures(page):
    assert page.of("html")[0]["lang"] == "en"
    assert "title" in {tag for tag, _ in page.tags}
    assert "width=device-width" in next(a["content"] for a in page.of("meta") if a.get("name") == "viewport")
    drawings = page.of("svg")
    assert len(drawings) > 5
    assert all(attributes["role"] == "img" and attributes["aria-label"] for attributes in drawings)


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return np.dot(linear, [0.2126, 0.7152, 0.0722])


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_has_enough_contrast(scheme):
    """WCAG 2.2, 1.4.3: a contrast of at least 4.5 for every text colour on both backgrounds."""
    css = html.read("report.css")
    palette = dict(re.findall(r"--(\w+): (#\w{6})", re.findall(r":root \{(.*?)\}", css, flags=re.S)[scheme]))
    assert len(palette) == 9
    for ground in ("paper", "panel"):
        for name in ("ink", "soft", "link", "good", "bad", "maybe"):
            high, low = sorted((luminance(palette[name]), luminance(palette[ground])), reverse=True)
            assert (high + 0.05) / (low + 0.05) >= 4.5, f"{name} on {ground}"


def test_text_from_records_cannot_inject_markup(tmp_path):
    source = next(r for r in records.scan(GOLDEN) if r.config.dataset.name == "digits")
    config = source.config.but(preset="<script>alert(1)</script>")
    records.write(tmp_path, records.Record(config=config, seed=0, scores=source.scores, git='"><script>'))
    found = report.page(tmp_path)
    assert found.count("<script>") == 1
    assert "&lt;script&gt;" in found


def test_a_page_without_any_record_says_what_to_run(tmp_path):
    target = report.write(tmp_path)
    found = Page(target.read_text())
    assert target == tmp_path / "report.html"
    words = "".join(found.words)
    assert "No records yet" in words
    assert "east-run task=compare dataset.path=my.csv" in words
    assert "No trials yet for east_v2_1" in words


def test_a_full_disk_leaves_the_old_page_and_figure(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    figure = plots.steps(np.linspace(0, 1, 5), {0.1: np.linspace(0, 1, 5)}, 0.5)
    files = [report.write(tmp_path), *plots.save(figure, tmp_path / "steps")]
    before = [file.read_bytes() for file in files]
    monkeypatch.setattr("east.lab.files.os.fsync", full)
    for write in (lambda: report.write(tmp_path), lambda: plots.save(figure, tmp_path / "steps")):
        with pytest.raises(OSError, match="No space left"):
            write()
    assert [file.read_bytes() for file in files] == before
    assert sorted(tmp_path.iterdir()) == sorted(files)


def test_your_own_runs_come_before_the_papers_tables(page, results):
    """Every setting with finished trials has a line."""
    sections = [attributes["id"] for attributes in page.of("section") if attributes.get("id") in SECTIONS]
    assert sections == list(SECTIONS)
    keys = {record.key for record in records.scan(results) if (record.stage, record.status) == ("trial", "done")}
    words = "".join(page.words)
    assert len(keys) > 10
    assert words.index("digits, f1") < words.index("published cells"), "own runs first"


def test_your_own_files_are_shown_by_name(tmp_path):
    """Two of your own files are both datasets called csv."""
    source = next(r for r in records.scan(GOLDEN) if r.config.dataset.name == "digits")
    for name in ("trees.csv", "data/birds.csv"):
        dataset = DatasetSection(name="csv", kind="table", path=name)
        records.write(tmp_path, records.Record(config=source.config.but(dataset=dataset), seed=0, scores=source.scores))
    for page in ("compare/birds-f1_macro", "evaluate/new-birds"):
        (tmp_path / page).mkdir(parents=True)
        (tmp_path / page / "report.html").write_text("")
    shown = report.page(tmp_path)
    loss = source.config.loss.name
    assert re.findall(r">([\w.]+\.csv), (\w+)<", shown) == [("birds.csv", loss), ("trees.csv", loss)]
    assert "csv, " + loss not in re.sub(r"\w+\.csv, ", "", shown)
    assert re.findall(r'<a href="([^"#]*report\.html)">', shown) == [
        "compare/birds-f1_macro/report.html",
        "evaluate/new-birds/report.html",
    ]


def test_long_tables_are_folded(results, monkeypatch):
    scanned = records.scan(results)
    assert "<details>" not in report._held(report._finished(scanned), results)
    monkeypatch.setattr(report, "FOLDED", 2)
    folded = report._held(report._finished(scanned), results)
    rows = len({record.key for record in scanned if (record.stage, record.status) == ("trial", "done")})
    assert folded.startswith(f"<details><summary>{rows} rows</summary><div")


def test_a_large_folder_lists_its_settings_once_and_draws_few_examples(results, text, monkeypatch):
    assert "<h3>All records</h3>" in text
    drawn = re.findall(r"Confusion matrix, test: (\w+)", text)
    assert len({*drawn}) == 3
    monkeypatch.setattr(report, "FOLDED", 2)
    monkeypatch.setattr(report, "EXAMPLES", 1)
    large = report.page(results)
    assert "<h3>All records</h3>" not in large
    assert {*re.findall(r"Confusion matrix, test: (\w+)", large)} == {"digits"}  # the one that was run there


def test_the_released_variant_is_shown_if_it_has_records(page):
    ids = {attributes.get("id") for _, attributes in page.tags}
    assert "east_v2_1-released" in ids
    assert "btg_2-released" not in ids


PROBE = """<script>
const light = (c) => c.map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const colour = (text) => text.match(/[\\d.]+/g).map(Number);
const ground = (e) => {
  for (; e; e = e.parentElement) {
    const c = colour(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] > 0) return c.slice(0, 3);
  }
};
const weak = new Set();
for (const e of document.querySelectorAll("main *, header *")) {
  if (e.closest("svg") || ![...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())) continue;
  const [a, b] = [light(colour(getComputedStyle(e).color).slice(0, 3)), light(ground(e))];
  if ((Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 4.5) weak.add(e.tagName + "." + e.className);
}
const table = [...document.querySelectorAll("#east_v2_1 table")].find((t) => t.textContent.startsWith("mammography"));
const button = table.querySelector("th[data-column='2'] button");
const names = () => [...table.tBodies[0].rows].map((row) => row.cells[0].textContent);
const before = names(); button.click(); const falling = names(); button.click(); const rising = names();
table.querySelector("th[data-column='1'] button").click(); const ours = names();
const found = { weak: [...weak], before, falling, rising, ours,
  requests: performance.getEntriesByType("resource").map((r) => r.name),
  overflow: document.documentElement.scrollWidth - innerWidth,
  dark: getComputedStyle(document.body).backgroundColor,
  small: [...document.querySelectorAll("th button")]
    .filter((b) => b.checkVisibility() && b.getBoundingClientRect().height < 23.9).length };
document.body.insertAdjacentHTML("beforeend", `<pre id="found">${JSON.stringify(found)}</pre>`);
</script>"""


def browse(text, folder, *options, probe=PROBE):
    """Open the page with a probe in it; return what the probe saw, and the browser's console messages."""
    installed = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome", "chrome"))
    browser = os.environ.get("CHROME_PATH") or next(filter(None, installed), None)
    if not browser:
        pytest.skip("no browser: neither chromium nor chrome is installed, and CHROME_PATH names none")
    file = folder / "probe.html"
    file.write_text(text.replace("</body>", probe + "</body>"), encoding="utf-8")
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command = [browser, *flags, "--enable-logging=stderr", *options, "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(unescape(re.findall(r'<pre id="found">(.*?)</pre>', done.stdout, flags=re.S)[-1])), console


@pytest.mark.slow
@pytest.mark.parametrize("width", [1300, 500])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_works_in_a_real_browser(text, tmp_path, width, scheme):
    number = {"dark": 0, "light": 1}[scheme]
    found, console = browse(
        text, tmp_path, f"--window-size={width},900", f"--blink-settings=preferredColorScheme={number}"
    )
    assert console == []
    assert found["requests"] == []
    assert found["weak"] == []
    assert found["small"] == 0, "WCAG 2.2, 2.5.8: targets of at least 24 pixels"
    assert found["overflow"] <= 0, "the page itself never scrolls sideways"
    assert found["dark"] == ("rgb(22, 22, 21)" if scheme == "dark" else "rgb(255, 255, 255)")
    assert found["before"] == ["F1*", "Acc*", "MCC*", "Dice", "CE"]
    assert found["falling"] == ["MCC*", "CE", "F1*", "Acc*", "Dice"], "published F1: .787 .755 .750 .748 .077"
    assert found["rising"] == found["falling"][::-1]
    assert found["ours"][-1] == "MCC*", "what was not run stays last"
