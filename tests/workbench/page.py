"""Looking at the workbench: a page that is watched, what can be read off it, and scripts that run inside it."""

import io
import time
from contextlib import contextmanager

import numpy as np
from PIL import Image

from tests.http_service import PATIENCE


@contextmanager
def looking(browser, url, query="", width=1200, scheme="light", outside="/v1/", routes=None):
    """An open page; at its end nothing was said on the console and nothing was asked of anybody else.

    `routes` maps a pattern of addresses to what answers it. They are set before the page is loaded: Chromium confirms a
    new route before the page's own loader has it, so the next request may pass it by, and Playwright, which waits for
    the route to stop that request, never reports it.
    """
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce")
    page.set_default_timeout(1000 * PATIENCE)
    page.add_init_script(WAITING)
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: (said.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda request: (asked.append(request.url), page.open_.add(request)))
    for end in ("requestfinished", "requestfailed"):
        page.on(end, lambda request: page.open_.discard(request))
    page.open_ = set()
    for pattern, answer in (routes or {}).items():
        page.route(pattern, answer)
    page.goto(f"{url}/workbench/{query}")
    page.wait_for_selector("body.ready")
    settle(page)
    yield page
    settle(page)
    assert said == []
    assert [u for u in asked if not u.startswith((f"{url}/workbench/", f"blob:{url}/", url + outside))] == []
    page.close()


def until(page, condition) -> None:
    """Until this is true on the page; a typed filter and the slider wait a moment before they ask."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:  # wait_for_function needs eval, which the page's policy forbids
        if page.evaluate(condition):
            return
        page.wait_for_timeout(20)
    raise AssertionError(f"never true: {condition}")


def settle(page) -> None:
    """Until the page waits for nothing (an answer, a timer, a frame) and nothing is asked for, a few looks long."""
    quiet, end = 0, time.monotonic() + PATIENCE
    while quiet < 3:
        assert time.monotonic() < end, "the page never came to rest"
        page.wait_for_timeout(20)
        quiet = 0 if page.open_ or page.evaluate("waiting()") else quiet + 1


def ink(page, canvas="canvas-a") -> int:
    """How many pixels of a canvas are painted."""
    return page.evaluate(
        """id => { const c = document.getElementById(id);
        const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
        let n = 0; for (let k = 3; k < d.length; k += 4) n += d[k] > 0; return n; }""",
        canvas,
    )


def shown(page, selector) -> list[float]:
    """Scores of the pairs in a list."""
    return page.eval_on_selector_all(f"{selector} .pair", "items => items.map(i => Number(i.dataset.score))")


def all_decoded(page, selector) -> bool:
    page.eval_on_selector_all(selector, "items => items.forEach(i => { i.loading = 'eager'; })")
    end = time.monotonic() + PATIENCE
    while not page.eval_on_selector_all(selector, "items => items.every(i => i.complete)"):
        assert time.monotonic() < end, f"pictures that never come: {selector}"
        settle(page)
    return page.eval_on_selector_all(selector, "items => items.every(i => i.naturalWidth > 0)")


def dropped(page, content: bytes, name="probe.png", kind="image/png") -> None:
    """Drop a file, as a hand with a mouse does."""
    page.evaluate(
        """([bytes, name, kind]) => {
        const dataTransfer = new DataTransfer();
        dataTransfer.items.add(new File([new Uint8Array(bytes)], name, { type: kind }));
        const zone = document.getElementById('drop');
        const say = (n) => zone.dispatchEvent(new DragEvent(n, { dataTransfer, bubbles: true, cancelable: true }));
        ['dragenter', 'dragover', 'drop'].forEach(say); }""",
        [list(content), name, kind],
    )
    page.wait_for_selector("#live-answer:not([aria-busy]) p")


def png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


# Counts in the page itself what it waits for, so that a busy machine cannot make it look done before it is.
WAITING = """(() => {
  const { fetch, setTimeout, clearTimeout, requestAnimationFrame } = window;
  const timers = new Set();
  let open = 0;
  const done = () => setTimeout(() => { open -= 1; }, 0); // after whoever has waited for it
  const counted = (promise) => { open += 1; promise.then(done, done); return promise; };
  window.waiting = () => open + timers.size;
  window.fetch = (...given) => counted(fetch(...given).then((answer) => {
    for (const way of ['json', 'text', 'blob', 'arrayBuffer']) {
      const read = answer[way].bind(answer);
      answer[way] = () => counted(read());
    }
    return answer;
  }));
  window.setTimeout = (act, ...given) => {
    const timer = setTimeout((...more) => { timers.delete(timer); act(...more); }, ...given);
    timers.add(timer);
    return timer;
  };
  window.clearTimeout = (timer) => { timers.delete(timer); clearTimeout(timer); };
  window.requestAnimationFrame = (act) => {
    open += 1;
    return requestAnimationFrame((now) => { open -= 1; act(now); });
  };
})();"""

# What has the focus, and whether one sees that it has; nothing past the last element.
FOCUSED = """() => {
  const e = document.activeElement, s = getComputedStyle(e);
  const ring = s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 1;
  return e === document.body ? null : [e.id || e.textContent.trim().slice(0, 20), ring];
}"""

# Elements with text of their own whose contrast with the nearest painted background is below 4.5 to 1.
CONTRAST = """() => {
  const rgb = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const part = (v) => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const c = rgb(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] > 0.9) return c;
    }
    return [255, 255, 255];
  };
  const own = (e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
  const seen = (e) => own(e) && e.offsetParent && !e.closest('svg, :disabled, option');
  return [...document.querySelectorAll('main *, header *')].filter(seen).map((e) => {
    const [a, b] = [light(rgb(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
    return [(a + 0.05) / (b + 0.05), e.outerHTML.slice(0, 80)];
  }).filter(([ratio]) => ratio < 4.5);
}"""

# Milliseconds to paint 50,000 points, to find the one under the pointer, and to walk to the next: the least of several.
MANY_POINTS = """async () => {
  const { PointMap } = await import('/workbench/static/embedding_map.js');
  const { paint: painted } = await import('/workbench/static/scatter_renderer.js');
  const canvas = document.createElement('canvas');
  Object.assign(canvas.style, { width: '900px', height: '600px' });
  document.querySelector('main').append(canvas);
  const n = 50000;
  const draw = () => Float32Array.from({ length: n }, () => 2 * Math.random() - 1);
  const map = new PointMap(canvas, { point() {} });
  map.resized();
  map.setPoints(draw(), draw(), Uint32Array.from({ length: n }, (_, i) => i % 500));
  map.setColours(['#0072B2', '#E69F00', '#009E73'], Uint32Array.from({ length: n }, (_, i) => i % 3));
  const time = (act, times, each) => {
    let least = Infinity;
    for (let k = 0; k < times; k += 1) {
      const begun = performance.now();
      for (let j = 0; j < each; j += 1) act(k * each + j);
      least = Math.min(least, (performance.now() - begun) / each);
    }
    return least;
  };
  painted(map);
  const paint = time((k) => { map.view.x = k / 100; painted(map); }, 10, 1);
  const pick = time((k) => map.under(450 + k % 50, 300), 20, 10);
  const walk = time(() => map.walk([1, 0]), 5, 1);
  canvas.remove();
  return { paint, pick, walk };
}"""
