"""The parts of the workbench's JavaScript that touch no page, each against the same in Python or NumPy."""

import json
import math

import numpy as np
import pytest

import mettle.workbench
from mettle.workbench.lazy_run import pack_arrays
from tests.http_service import PATIENCE

HOME = "http://workbench.test/workbench/"
STATIC = f"{mettle.workbench.__path__[0]}/static"


@pytest.fixture(scope="module")
def call(browser):
    """Runs a function of JavaScript that is given the exports of a module, and an argument."""
    page = browser.new_page()
    page.set_default_timeout(1000 * PATIENCE)
    page.route(
        f"{HOME}**", lambda route: route.fulfill(body="<!doctype html><title>empty</title>", content_type="text/html")
    )

    def script(route):
        name = route.request.url.rpartition("/")[2]
        route.fulfill(path=f"{STATIC}/{name}", content_type="text/javascript")

    page.route(f"{HOME}static/*.js", script)
    page.goto(HOME)

    def run(module: str, function: str, given=None):
        body = f"async ([given]) => ({function})(await import('{HOME}static/{module}.js'), given)"
        return page.evaluate(body, [given])

    run.page = page
    yield run
    page.close()


@pytest.mark.parametrize("count", [1, 7, 500])
def test_the_nearest_point_is_that_of_looking_at_all(call, count):
    rng = np.random.default_rng(count)
    points, asked = rng.uniform(-1, 1, (count, 2)).astype(np.float32), rng.uniform(-1.2, 1.2, (200, 2))
    points[: count // 4] = np.round(points[: count // 4], 1)  # some in one place
    passes, reach = (rng.random(count) < 0.7).astype(int), 0.3
    function = """({Cells}, {x, y, passes, asked, reach}) => {
      const cells = new Cells(Float32Array.from(x), Float32Array.from(y));
      return asked.map(([px, py]) => cells.nearest(px, py, reach, passes));
    }"""
    given = {"x": points[:, 0].tolist(), "y": points[:, 1].tolist(), "passes": passes.tolist()}
    found = call("spatial_grid", function, given | {"asked": asked.tolist(), "reach": reach})
    squared = ((points[None].astype(float) - asked[:, None]) ** 2).sum(2)
    squared[:, passes == 0] = np.inf
    for row, at in zip(squared, found, strict=True):
        if at == -1:
            assert row.min() >= reach**2
        else:
            assert row[at] == row.min() < reach**2


def test_shares_keep_their_first_two_digits(call):
    shares = [0, 1, 0.5, 0.123456, 0.0999, 0.0123, 0.001, 0.00012, 3e-7, 1e-12, -0.25]
    texts = call("dom", "({percent}, shares) => shares.map(percent)", shares)
    for share, text in zip(shares, texts, strict=True):
        number, unit = text.split("\u00a0")
        assert unit == "%"
        error = abs(float(number) - 100 * share)
        digits = 1 if share == 0 or abs(share) >= 0.1 else min(6, 1 - math.floor(math.log10(100 * abs(share))))
        assert error <= 0.5 * 10.0**-digits + 1e-12
    assert call("dom", "({percent}) => [NaN, Infinity].map(percent)") == ["–", "–"]


def test_numbers_are_written_as_python_writes_them(call):
    whole = [0, 1, 999, 1000, 1234567.4, 0.6]
    assert call("dom", "({whole}, n) => n.map(whole)", whole) == [f"{round(n):,}" for n in whole]
    signed = [0.0, 1.005, -0.25, -12.3456]
    wanted = [f"{n:.2f}".replace("-", "\u2212") for n in signed]
    assert call("dom", "({signed}, n) => n.map(signed)", signed) == wanted
    plural = call("dom", "({plural}) => [0, 1, 2000].map((n) => plural(n, 'pair', 'pairs'))")
    assert plural == ["0 pairs", "1 pair", "2,000 pairs"]


def test_text_never_becomes_markup(call):
    function = "({el}, text) => el('p', {text, title: text}, el('b', {text})).outerHTML.includes('<img')"
    assert call("dom", function, "<img src=x onerror=alert(1)>") is False


def test_only_the_last_call_of_a_burst_is_made(call):
    function = """async ({later}) => {
      const made = [];
      const call = later(5, (k) => made.push(k));
      for (let k = 0; k < 5; k += 1) call(k);
      await new Promise((done) => setTimeout(done, 50));
      call(9);
      call.cancel();
      await new Promise((done) => setTimeout(done, 50));
      return made;
    }"""
    assert call("dom", function) == [4]


def test_an_answer_that_comes_after_a_newer_question_is_dropped(call):
    function = """async ({newest}) => {
      const turn = newest();
      let first;
      const old = turn(new Promise((done) => { first = done; }));
      const young = await turn(Promise.resolve("new"));
      first("old");
      return [young, (await old) === undefined];
    }"""
    assert call("dom", function) == ["new", True]


def test_arrays_arrive_as_the_service_packed_them(call):
    sent = {
        "x": np.asarray([0.5, -1.25, 3e30], np.float32),
        "code": np.asarray([0, 7, 2**32 - 1, 5, 9], np.uint32),
        "score": np.linspace(0, 1, 4),
        "nothing": np.empty(0, np.float32),
    }
    body = pack_arrays(sent, name="Žofie")
    call.page.route(f"{HOME}api/packed*", lambda route: route.fulfill(body=body))
    function = """async ({arrays}) => {
      const found = await arrays("packed", [["a", 1]]);
      return [found.name, Object.entries(found.arrays).map(([k, v]) => [k, v.constructor.name, Array.from(v)])];
    }"""
    name, found = call("api", function)
    assert name == "Žofie"
    assert {key: values for key, _, values in found} == {key: array.tolist() for key, array in sent.items()}
    assert [kind for _, kind, _ in found] == ["Float32Array", "Uint32Array", "Float64Array", "Float32Array"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"error": "one line"}, "one line"),
        ({"error": {"code": "rate", "message": "too often"}}, "too often"),
        ({"detail": "no run 5"}, "no run 5"),
        ({}, "the service answered 503"),
        (None, "the service answered 503"),
    ],
)
def test_a_refusal_says_why(call, body, said):
    text = "<html>" if body is None else json.dumps(body)
    function = """async ({told, Refused}, text) => {
      try {
        await told(new Response(text, {status: 503}));
      } catch (error) {
        return error instanceof Refused ? error.message : "another error";
      }
    }"""
    assert call("api", function, text) == said


def test_addresses_hold_queries_in_their_order(call):
    function = "({address}, query) => address('runs/0/pairs', query).href"
    found = call("api", function, [["column", 1], ["value", 2], ["column", 3], ["text", "a&b ü"]])
    assert found == f"{HOME}api/runs/0/pairs?column=1&value=2&column=3&text=a%26b+%C3%BC"


@pytest.mark.parametrize("names", [3, 8, 9, 40])
def test_every_point_has_a_color_and_few_names_have_their_own(call, names):
    rng = np.random.default_rng(0)
    codes, hard = rng.integers(0, names, 60), rng.normal(size=60)
    facts = {"labels": [f"p{k}" for k in range(names)], "columns": [{"name": "device", "names": ["a", ""]}]}
    function = """({coloured, choices, usual}, {facts, codes, hard}) => {
      const points = {
        label: Uint32Array.from(codes),
        difficulty: Float32Array.from(hard),
        "column.0": Uint32Array.from(codes, (c) => c % 2),
      };
      const found = choices(facts).map(({key}) => {
        const {palette, code, legend} = coloured(facts, points, key);
        return {key, code: Array.from(code), colors: palette.length, legend: legend.length};
      });
      return [usual(facts), found];
    }"""
    usual, found = call("color_scales", function, {"facts": facts, "codes": codes.tolist(), "hard": hard.tolist()})
    assert usual == "column.0"
    assert [one["key"] for one in found] == ["class", "column.0", "difficulty"]
    assert all(0 <= code < one["colors"] for one in found for code in one["code"])
    assert found[0]["legend"] == (names if names <= 8 else 0)
    if names <= 24:
        assert found[0]["code"] == codes.tolist()
    order = np.argsort(hard)
    assert (np.diff(np.asarray(found[2]["code"])[order]) >= 0).all()  # harder points are never of an easier color


@pytest.mark.parametrize(
    ("known", "said"),
    [([True, True], "Ranges are"), ([False, True], "Ranges are"), ([False, False], "There are no intervals")],
)
def test_ranges_are_explained_where_there_are_any(call, known, said):
    function = "({describeIntervals}, numbers) => describeIntervals(numbers)"
    assert call("summary", function, [{"has_interval": one} for one in known]).startswith(said)
