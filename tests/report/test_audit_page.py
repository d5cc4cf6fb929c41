"""The page of an audit: it stands alone, shows what was measured, and names cannot break out of it."""

import json
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image
from tables import HOSTILE

from mettle.data.embeddings import read_embeddings
from mettle.errors import RunError
from mettle.evaluate.audit import audit
from mettle.report.audit_page import write_audit
from mettle.report.caveats import rank_audit_caveats


class Reader(HTMLParser):
    def __init__(self, page: str):
        super().__init__()
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.heads: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.sources += [value for key, value in attrs if key in ("src", "href") and value]

    def handle_data(self, data):
        if self.tags and self.tags[-1] == "h2" and data.strip():
            self.heads.append(data.strip())


def rows(folder, *, pictures: bool, hostile: bool = False):
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(20), 8)
    x = rng.normal(size=(20, 10))[y] + 0.9 * rng.normal(size=(160, 10))
    columns = {
        "label": np.asarray([HOSTILE if hostile and k == 3 else f"part {k:02d}" for k in y]),
        "camera": np.tile(["bench", HOSTILE if hostile else "line"], 80),
        "batch": np.where(y < 10, "old", "new"),
        "split": np.where(np.arange(160) % 8 < 5, "train", "test"),
    }
    if pictures:
        for k in range(160):
            Image.fromarray(rng.integers(0, 255, (8, 8), np.uint8)).save(folder / f"{k}.png")
        (folder / "5.png").write_bytes(b"no picture")
        columns["path"] = np.asarray([f"{k}.png" for k in range(160)])
    np.savez(folder / "z.npz", embeddings=x, **columns)
    return audit(read_embeddings(folder / "z.npz"))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audit")
    found = rows(folder, pictures=True, hostile=True)
    return found, write_audit(found, folder / "out", ["mettle", "audit", "a file.npz"])


def test_page_needs_nothing_else_and_names_are_escaped(made):
    text = made[1].read_text(encoding="utf-8")
    reader = Reader(text)
    assert reader.sources and all(source.startswith(("data:image/", "#")) for source in reader.sources)
    assert not {"script", "link", "iframe", "object"} & set(reader.tags)
    assert HOSTILE not in text and HOSTILE.replace("<", "&lt;").replace(">", "&gt;") in text
    assert "url(" not in text and "@import" not in text and len(text) < 3_000_000
    assert "mettle audit &#39;a file.npz&#39;" in text


def test_every_section_is_there(made):
    heads = Reader(made[1].read_text(encoding="utf-8")).heads
    assert heads == [
        "What to do next",
        "Suspected label errors",
        "Suspected same subject",
        "Hardest negatives",
        "Hardest positives",
        "Who is taken for whom",
        "All numbers",
        "How well pairs are told apart",
        "Operating points",
        "Domain by domain",
        "Groups",
        "By difficulty and class size",
        "Shape of the space",
        "Map of the embeddings",
        "What this page leaves out",
    ]


def test_page_and_json_show_what_was_measured(made):
    found, page = made
    facts = json.loads((page.parent / "audit.json").read_text(encoding="utf-8"))
    assert facts.pop("warnings") == list(rank_audit_caveats(found))
    assert facts == json.loads(json.dumps(found.summary()))
    text = page.read_text(encoding="utf-8")
    for way in found.ways.values():
        assert f"{100 * way.verification.eer:.2f}\N{NO-BREAK SPACE}%" in text
        assert f"{way.verification.auc:.4f}" in text
    assert found.geometry.verdict[1:] in text
    assert f"{100 * found.probe.linear.accuracy:.1f}\N{NO-BREAK SPACE}%" in text
    assert f"{found.label_errors.count:,} samples fit another label" in text
    assert str(found.label_errors.noise)[1:].replace("'", "&#39;") in text
    assert facts["label_errors"]["estimate"]["wrong"] == found.label_errors.noise.wrong
    for pair in found.hardest["impostor"][:12]:
        assert f"<b>{pair.score:.3f}</b>" in text


def test_pictures_are_shown_where_they_can_be_read(made):
    text = made[1].read_text(encoding="utf-8")
    assert text.count('<img class="picture"') >= 24


def test_without_pictures_ids_are_shown_and_the_page_is_the_same_every_time(tmp_path):
    found = rows(tmp_path, pictures=False)
    text = write_audit(found, tmp_path / "a").read_text(encoding="utf-8")
    assert '<img class="picture"' not in text and "<code>" in text
    assert write_audit(found, tmp_path / "b").read_text(encoding="utf-8") == text


def test_labels_alone_are_enough(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "z.npz", x=rng.normal(size=(6, 3)), y=[0, 0, 1, 1, 2, 2])
    found = audit(read_embeddings(tmp_path / "z.npz"))
    heads = Reader(write_audit(found, tmp_path / "out").read_text(encoding="utf-8")).heads
    assert "Domain by domain" not in heads and "Groups" not in heads and "Hardest positives" in heads


def test_a_folder_that_cannot_be_made(made, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="choose another --output"):
        write_audit(made[0], tmp_path / "file" / "out")


def test_in_a_browser(browser, made):
    for width, scheme in ((1200, "light"), (390, "dark")):
        page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        said: list[str] = []
        page.set_default_timeout(120_000)
        page.on("console", lambda message, said=said: said.append(message.text))
        page.goto(made[1].as_uri())
        assert said == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        widths = page.evaluate("Array.from(document.images, i => i.complete ? i.naturalWidth : 0)")
        assert len(widths) > 10 and min(widths) > 0
        out = page.evaluate(
            """Array.from(document.querySelectorAll('main *')).filter(e => !e.closest('.scroll'))
            .filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"""
        )
        assert out == []
