"""The page about a results folder: it has everything that is there, loads nothing else, and escapes what it shows."""

from html.parser import HTMLParser

import pytest

from east.lab.tasks import report
from tests.made import GOLDEN, rendered

DRAWING = '<svg xmlns="http://www.w3.org/2000/svg"><path d="M 0 0 L 1 1"/></svg>'


class Page(HTMLParser):
    """The attributes of every tag, and the text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.words = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data):
        self.words.append(data)

    def of(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture
def results(tmp_path):
    (tmp_path / "figures").mkdir()
    for name in ("figures/a b#1.svg", "figures/study_bias.svg"):
        (tmp_path / name).write_text(DRAWING)
    for name in ("compare/birds-f1_macro", "evaluate/new-birds"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "report.html").write_text("")
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "east_v2_1.md").write_text(rendered("east_v2_1", GOLDEN))
    return tmp_path


def test_everything_in_the_folder_is_on_the_page_and_every_link_leads_somewhere(results):
    page = Page(report.index(results))
    assert page.open == []
    assert page.of("html")[0]["lang"] == "en"
    assert not page.of("script")
    links = [attributes["href"] for attributes in page.of("a")]
    assert links == ["compare/birds-f1_macro/report.html", "evaluate/new-birds/report.html"]
    images = [attributes["src"] for attributes in page.of("img")]
    assert images == ["figures/a%20b%231.svg", "figures/study_bias.svg"]
    assert all(attributes["alt"] for attributes in page.of("img"))
    assert (results / "tables" / "east_v2_1.md").read_text() in page.words


def test_an_empty_folder_gets_a_page_that_says_what_to_run(tmp_path):
    assert "east-run task=compare dataset.path=my.csv" in report.index(tmp_path)


def test_a_table_that_cannot_be_read_is_left_out_with_a_warning(results):
    (results / "tables" / "b.md").mkdir()
    (results / "tables" / "c.md").write_bytes(b"\xff")
    with pytest.warns(UserWarning, match="not shown") as warned:
        page = report.index(results)
    assert len(warned) == 2
    assert page.count("<details>") == 1
