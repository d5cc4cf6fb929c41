"""Every kind of page in a real browser, opened from disk: light, dark, and as wide as a telephone."""

import numpy as np
import pytest
from PIL import Image
from tables import HOSTILE

from mettle.data.embeddings import read_embeddings
from mettle.evaluate.audit import audit
from mettle.mining import mine
from mettle.report import write_audit, write_comparison, write_report
from mettle.report.mining_page import write_mining_page
from mettle.report.search_page import write_search_page
from mettle.train.recipe import parse_recipe
from mettle.train.search import FoldResult, Trial

PATIENCE = 120_000  # milliseconds: what a busy machine delays is no failure
pytestmark = pytest.mark.timeout(900)


def look(browser, path, width=1200, scheme="light"):
    """Open a page; what it says on the console and what it asks the network for are kept."""
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page.set_default_timeout(PATIENCE)
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: (said.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    return page, said, asked


def check_alone(browser, path) -> None:
    """No message, no request but for the file itself, every picture decoded."""
    page, said, asked = look(browser, path)
    assert said == []
    assert [url for url in asked if not url.startswith("data:")] == [path.as_uri()]
    widths = page.evaluate("Array.from(document.images, i => i.complete ? i.naturalWidth : 0)")
    assert len(widths) >= 6
    assert min(widths) > 0
    assert page.locator("h1").count() == 1
    assert page.locator("h2").count() >= 4
    page.close()


def check_width(browser, path, width, scheme="light") -> None:
    """A box may scroll inside itself; nothing else may be cut off or lie outside the window."""
    page, said, _ = look(browser, path, width, scheme)
    page.evaluate("for (const fold of document.querySelectorAll('details')) fold.open = true")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    out = page.evaluate(
        """Array.from(document.querySelectorAll('main *')).filter(e => !e.closest('.scroll'))
        .filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"""
    )
    assert out == []
    cut = page.evaluate(
        "Array.from(document.querySelectorAll('.tile *')).filter(e => e.scrollWidth > e.clientWidth + 1 && "
        "getComputedStyle(e).display != 'inline').map(e => e.outerHTML.slice(0, 80))"
    )
    assert cut == [], "the text of a tile is wider than the tile"
    assert said == []
    page.close()


TOUCHING = """() => {
  const found = [];
  for (const image of document.images) {
    if (!image.src.startsWith('data:image/svg')) continue;
    const drawing = atob(image.src.split(',')[1]), host = document.createElement('div');
    host.style = 'position:absolute;left:0;top:0;width:900px';
    host.innerHTML = drawing.slice(drawing.indexOf('<svg'));
    document.body.append(host);
    const boxes = [...host.querySelectorAll('g[id^="text_"]')].map(g => g.getBoundingClientRect())
      .filter(box => box.width > 0);
    boxes.forEach((a, i) => boxes.slice(i + 1).forEach(b => {
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (wide > 1 && high > 1) found.push(`${image.alt}: ${wide.toFixed(1)} x ${high.toFixed(1)}`);
    }));
    host.remove();
  }
  return found;
}"""


def check_labels(browser, path) -> None:
    """No two labels of a figure overlap; matplotlib draws each as a group of its own."""
    page, _, _ = look(browser, path)
    assert page.evaluate(TOUCHING) == []
    page.close()


def check_page(browser, path) -> None:
    """Nothing on the console, nothing cut off, readable in both schemes, labels apart."""
    for width, scheme in ((390, "light"), (390, "dark"), (768, "light"), (1200, "dark")):
        check_width(browser, path, width, scheme)
    check_schemes(browser, path)
    check_labels(browser, path)


def check_schemes(browser, path) -> None:
    """Text stays apart from its background in both colour schemes, and they differ."""
    shades = {}
    for scheme in ("light", "dark"):
        page, _, _ = look(browser, path, scheme=scheme)
        read = "getComputedStyle(document.body)"
        ink, paper = (page.evaluate(f"{read}.{what}") for what in ("color", "backgroundColor"))
        shades[scheme] = [sum(map(int, text.strip("rgb()").split(","))) for text in (ink, paper)]
        page.close()
    assert shades["light"][1] - shades["light"][0] > 400
    assert shades["dark"][0] - shades["dark"][1] > 400


# One test per page: writing a page costs more than looking at it, and parallel workers share nothing.
def test_report(browser, made):
    path = write_report(made.run, made.evaluation)
    check_alone(browser, path)
    check_page(browser, path)
    page, said, _ = look(browser, path)
    assert page.locator("script").count() == 0
    assert page.get_by_text(HOSTILE).count() > 0
    assert page.locator(".panes > div:visible").count() == 1
    page.locator(".choices label").nth(1).click()  # colours by class, without a script
    assert page.locator(".panes > div").nth(1).is_visible() and not page.locator(".panes > div").nth(0).is_visible()
    page.locator(".warnings summary").click()
    assert page.locator(".warnings li").first.is_visible()
    assert said == []
    page.close()


def test_report_of_a_closed_set(browser, closed):
    path = write_report(closed.run, closed.evaluation)
    check_page(browser, path)
    page, _, _ = look(browser, path)
    assert page.locator(".hero .name").inner_text().startswith("Top-1")
    page.close()


def test_report_of_retrieval(browser, ranked):
    path = write_report(ranked.run, ranked.evaluation)
    check_page(browser, path)
    page, _, _ = look(browser, path)
    assert page.locator(".hero .name").inner_text().startswith("Recall@1")
    page.close()


def test_report_of_rows(browser, table):
    path = write_report(table.run, table.evaluation)
    check_alone(browser, path)
    for width in (390, 1200):
        check_width(browser, path, width)


def test_report_of_two_encoders(browser, two):
    path = write_report(two.run, two.evaluation)
    check_alone(browser, path)
    check_page(browser, path)
    page, _, _ = look(browser, path, scheme="dark")
    assert page.locator(".anchor").count() == 4
    assert page.locator(".five img").count() == 4 * 10
    seen = page.locator('img[alt^="t-SNE"]:visible')
    assert seen.count() == 2
    boxes = [seen.nth(k).bounding_box() for k in (0, 1)]
    assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] < boxes[1]["x"]
    page.close()


def test_comparison(browser, made, other, two, tmp_path):
    write_report(two.run, two.evaluation)
    path = write_comparison([made.run, other.run, two.run], tmp_path / "comparison.html")
    check_alone(browser, path)
    check_page(browser, path)
    page, _, _ = look(browser, path)
    assert page.get_by_text("Paired differences").count() == 1
    page.close()


def test_audit(browser, tmp_path):
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(12), 8)
    x = rng.normal(size=(12, 10))[y] + 0.5 * rng.normal(size=(96, 10))
    place = tmp_path / "a folder" / "with a long name that has no end"
    place.mkdir(parents=True)
    names = [f"{place.parent.name}/{place.name}/{k:03d}.png" for k in range(96)]
    for name in names:
        Image.fromarray(rng.integers(0, 255, (40, 40), np.uint8)).save(tmp_path / name)
    label = np.asarray([HOSTILE if k == 3 else f"part {k:02d}" for k in y])
    label[[5, 40]] = label[[40, 5]]  # two wrong labels
    camera, batch = np.tile(["bench", "line"], 48), np.where(y < 6, "old", "new")
    np.savez(tmp_path / "z.npz", embeddings=x, label=label, path=np.asarray(names), camera=camera, batch=batch)
    path = write_audit(audit(read_embeddings(tmp_path / "z.npz")), tmp_path / "out")
    check_alone(browser, path)
    check_page(browser, path)
    page, _, _ = look(browser, path)
    first = page.locator(".suspect").first
    assert names[5] in first.inner_text() or names[40] in first.inner_text()
    assert first.locator("img").count() == 4  # the sample, and three of the class that it resembles
    assert first.locator("img").first.bounding_box()["width"] > 120
    for link in page.locator(".steps a").all():
        assert page.locator(link.get_attribute("href")).count() == 1
    assert page.locator(".choices label").all_inner_texts() == ["domain", "class", "batch"]
    page.close()


def test_mining(browser, tmp_path):
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(8), 6)
    x = rng.normal(size=(8, 6))[y] + 0.5 * rng.normal(size=(48, 6))
    row = {"domain": "", "picture": None}
    mined = mine(x.astype(np.float32), y)
    path = write_mining_page(
        mined,
        tmp_path / "mined.html",
        lambda at: {"name": f"sample {at}", "label": HOSTILE if y[at] == 0 else f"part {y[at]}", **row},
        name="parts",
        about="48 parts.",
        notes=["Labels may be wrong."],
    )
    check_page(browser, path)


def test_search(browser, tmp_path):
    recipe = parse_recipe(
        {"tune": {"ranges": {"train.rate": {"low": 1e-4, "high": 1e-2, "log": True}}, "trials": 4, "metric": "eer"}}
    )
    trials = [
        Trial(k, "finished", {"train.rate": rate}, 0.1 + 0.01 * k, (FoldResult(0.1, 2, ((0, 0.5), (2, 0.1))),))
        for k, rate in enumerate((9e-3, 1e-3, 2e-4), 1)
    ]
    trials.append(Trial(4, "failed", {"train.rate": 5e-3}, reason="training diverged: <i>nan</i>"))
    check_page(browser, write_search_page(recipe, trials, tmp_path / "tune.html", direction="min"))
