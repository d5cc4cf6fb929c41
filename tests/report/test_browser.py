"""The pages in a real browser, opened from disk."""

import pytest
from tables import HOSTILE

from mettle.report import write_comparison, write_report

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


def check_width(browser, path, width) -> None:
    """A box may scroll inside itself; nothing else may be cut off or lie outside the window."""
    page, _, _ = look(browser, path, width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    out = page.evaluate(
        """Array.from(document.querySelectorAll('main *')).filter(e => !e.closest('.scroll'))
        .filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"""
    )
    assert out == []
    page.close()


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
    for width in (390, 768, 1200):
        check_width(browser, path, width)
    check_schemes(browser, path)
    page, said, _ = look(browser, path)
    assert page.locator("script").count() == 0
    assert page.get_by_text(HOSTILE).count() > 0
    assert said == []
    page.close()


def test_report_of_rows(browser, table):
    path = write_report(table.run, table.evaluation)
    check_alone(browser, path)
    for width in (390, 1200):
        check_width(browser, path, width)


def test_report_of_two_encoders(browser, two):
    path = write_report(two.run, two.evaluation)
    check_alone(browser, path)
    for width in (390, 768, 1200):
        check_width(browser, path, width)
    page, _, _ = look(browser, path, scheme="dark")
    assert page.locator(".anchor").count() == 4
    assert page.locator(".five img").count() == 4 * 10
    assert page.locator('img[alt^="t-SNE"]').count() == 2
    boxes = [page.locator('img[alt^="t-SNE"]').nth(k).bounding_box() for k in (0, 1)]
    assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] < boxes[1]["x"]
    page.close()


def test_comparison(browser, made, other, two, tmp_path):
    write_report(two.run, two.evaluation)
    path = write_comparison([made.run, other.run, two.run], tmp_path / "comparison.html")
    check_alone(browser, path)
    for width in (390, 1200):
        check_width(browser, path, width)
