import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from tables import HOSTILE

from mettle.errors import RunError
from mettle.report import write_report
from mettle.report.format import format_percent


class Reader(HTMLParser):
    """Tags, attributes and visible text of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.addresses, self.words, self.hidden = [], [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.hidden = tag == "style"
        self.addresses += [v for k, v in attrs if k in ("src", "href", "srcset", "data", "action")]

    def handle_endtag(self, tag):
        self.hidden = False

    def handle_data(self, data):
        if not self.hidden:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def page(made):
    path = write_report(made.run, made.evaluation)
    return path, path.read_text(encoding="utf-8")


def test_where_things_go(made, page):
    path, _ = page
    assert path == made.run.folder / "report.html"
    assert (made.run.folder / "card.md").read_text(encoding="utf-8").startswith("# ")
    assert not list(made.run.folder.glob("*.mettle-tmp-*"))


def test_page_needs_nothing_else(page):
    reader = Reader(page[1])
    assert reader.addresses
    assert all(address.startswith("data:image/") for address in reader.addresses)
    assert not {"script", "link", "iframe", "object"} & set(reader.tags)
    assert "@import" not in page[1]
    assert "url(" not in page[1]
    assert len(page[1]) < 3_000_000


def test_names_are_escaped(page):
    assert HOSTILE not in page[1]
    assert HOSTILE.replace("<", "&lt;").replace(">", "&gt;") in page[1]
    assert HOSTILE in Reader(page[1]).text
    assert "out &amp; about" in page[1]


def test_page_shows_the_numbers_that_were_measured(made, page):
    text = Reader(page[1]).text
    for name, v in made.evaluation.results.verifications.items():
        assert name in text
        assert " ".join(format_percent(v.eer).split()) in text
        assert f"{v.auc:.4f}" in text
    for baseline in made.evaluation.metrics["baselines"].values():
        assert " ".join(format_percent(baseline["cross-domain"]["eer"]).split()) in text
    assert "Only 5 test identities" in text
    assert made.run.contract()["weights"] in text


def test_every_section_is_there(page):
    heads = re.findall(r"<h2>(.*?)</h2>", page[1])
    assert "<summary>Before you trust these numbers: " in page[1]
    assert heads == [
        "All numbers",
        "How well pairs are told apart",
        "Thresholds",
        "Hardest negatives",
        "Hardest positives",
        "Map of the embeddings",
        "Training",
        "Do it again",
    ]
    assert page[1].count('class="pair card"') == 10 + 12  # 5 identities x 2; 12


def test_the_same_run_gives_the_same_page(made, page):
    assert write_report(made.run, made.evaluation).read_text(encoding="utf-8") == page[1]


def test_rows_get_a_table_of_ids(table):
    text = write_report(table.run, table.evaluation).read_text(encoding="utf-8")
    assert 'class="pair card"' not in text
    assert "first: sample, label, domain" in text
    assert "no domains" in Reader(text).text
    assert Reader(text).addresses


def test_other_data_leave_the_card_alone(made, page, tmp_path):
    card = made.run.folder / "card.md"
    before = card.read_bytes()
    moved = replace(made.run, state={**made.run.state, "data": "another"})
    path = write_report(moved, made.evaluation, tmp_path / "elsewhere.html")
    assert "fingerprint" in path.read_text(encoding="utf-8")
    assert card.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_metrics_without_baselines_thresholds_or_log(made, tmp_path):
    bare = {k: v for k, v in made.evaluation.metrics.items() if k not in ("baselines", "thresholds")}
    run = replace(made.run, folder=tmp_path)
    (tmp_path / "recipe.toml").write_text(run.recipe.to_toml(), encoding="utf-8")
    text = write_report(run, replace(made.evaluation, metrics=bare)).read_text(encoding="utf-8")
    assert "<h2>Thresholds</h2>" not in text
    assert "<h2>Training</h2>" not in text
    assert 'class="bars"' not in text


def test_a_folder_that_is_not_there(made, tmp_path):
    with pytest.raises(RunError, match="there is no folder"):
        write_report(made.run, made.evaluation, tmp_path / "no" / "page.html")
