// Training curves: a panel a fact; a second run is laid over the first.

import { byId, el } from "./dom.js";
import { Plot, rounded } from "./line_plot.js";

/** @typedef {import("./api.js").View} View */

/** @param {View[]} runs */
export function showTraining(runs) {
  const titles = [...new Set(runs.flatMap((run) => run.panels.map((panel) => panel.title)))];
  const boxes = titles.map((title) => panelBox(title, runs));
  const none = el("p", { class: "note", text: "This run has no log to draw." });
  byId("panels").replaceChildren(...(boxes.length ? boxes : [none]));
}

/** @param {string} title @param {View[]} runs */
function panelBox(title, runs) {
  const found = runs.map((run) => run.panels.find((panel) => panel.title === title));
  const panel = found.find((own) => own !== undefined);
  if (panel === undefined) return null;
  const plot = new Plot({ title: `${title} over steps`, height: 210 });
  const lines = found.flatMap((own, k) =>
    (own?.lines ?? []).map((line, n) => ({
      points: line.points,
      run: "ab"[k],
      dashed: n > 0,
      name: line.name,
    })),
  );
  const all = lines.flatMap((line) => line.points);
  const steps = all.map(([step]) => step);
  const values = all.map(([, value]) => value);
  /** @param {number} v */
  const text = (v) => (panel.share ? `${Number((100 * v).toPrecision(4))} %` : String(Number(v.toPrecision(4))));
  let [low, high] = [Math.min(...values, ...(panel.share ? [0] : [])), Math.max(...values)];
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  const margin = panel.share ? 0 : 0.05 * (high - low);
  const [first, last] = [Math.min(...steps), Math.max(...steps)];
  plot.set({
    x: { low: first, high: last, ticks: rounded(first, last, 4), label: "step" },
    y: { low: low - margin, high: high + 0.05 * (high - low), ticks: rounded(low, high, 5, text) },
    lines,
  });
  const keys =
    panel.lines.length < 2
      ? null
      : el(
          "ul",
          { class: "line-keys" },
          panel.lines.map((line, n) =>
            el("li", null, el("span", { class: n ? "stroke dashed" : "stroke", "aria-hidden": "true" }), line.name),
          ),
        );
  return el(
    "figure",
    { class: "panel card" },
    el("div", { class: "panel-head" }, el("h3", { text: title })),
    plot.box,
    keys,
    el("figcaption", { class: "note", text: panel.caption }),
  );
}
