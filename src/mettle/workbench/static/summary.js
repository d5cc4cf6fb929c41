// The headline: numbers of one run with their intervals, or two runs with the interval of the difference.

import { ask, Refused } from "./api.js";
import { byId, el, newest } from "./dom.js";

const turn = newest();

export function showNumbers(view) {
  turn(null);
  const tiles = view.facts.numbers.map((n) =>
    el(
      "div",
      { class: "tile card", title: n.meaning },
      el("div", { class: "name", text: n.name }),
      el("div", { class: "value", text: n.text }),
      el("div", { class: "interval", text: n.interval }),
    ),
  );
  const note = el("p", { class: "note", text: describeIntervals(view.facts.numbers) });
  byId("numbers").replaceChildren(...(tiles.length ? [el("div", { class: "tiles" }, tiles), note] : []));
}

// What the ranges beside the numbers are, or why there are none.
export function describeIntervals(numbers) {
  return numbers.some((n) => n.has_interval)
    ? "Ranges are 95 % intervals over resampled identities."
    : "There are no intervals: too few identities were tested to resample them.";
}

export async function showComparison(first, second) {
  const box = byId("numbers");
  if (first.facts.data !== second.facts.data) {
    turn(null);
    const both = `${first.facts.name} and ${second.facts.name}`;
    const text = `${both} were tested on different samples, so their numbers cannot be compared.`;
    box.replaceChildren(el("p", { class: "warnings", role: "status", text }));
    return;
  }
  box.replaceChildren(el("p", { class: "note", role: "status", text: "Resampling the identities of both runs …" }));
  try {
    const found = await turn(ask(`compare/${first.index}/${second.index}`));
    if (found) box.replaceChildren(table(first, second, found.rows), told());
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    box.replaceChildren(el("p", { class: "warnings", role: "status", text: error.message }));
  }
}

const told = () =>
  el("p", {
    class: "note",
    text: "First less second; identities are resampled alike for both runs, and an interval that leaves out 0 decides.",
  });

const heads = (first, second) => ["", first.facts.name, second.facts.name, "difference", "95 % interval", "better"];

function table(first, second, rows) {
  const cells = heads(first, second).map((text, k) =>
    el("th", { scope: "col" }, k === 1 || k === 2 ? el("span", { class: `swatch ${"ab"[k - 1]}` }) : null, text),
  );
  return el(
    "div",
    { class: "scroll card", tabindex: 0, role: "region", "aria-label": "Both runs, number by number" },
    el(
      "table",
      { id: "comparison" },
      el("thead", null, el("tr", null, cells)),
      el(
        "tbody",
        null,
        rows.map((row) => line(row, first, second)),
      ),
    ),
  );
}

function line(row, first, second) {
  const show = (v) => (row.share ? `${(100 * v).toFixed(2)} %` : v.toFixed(4));
  const signed = (v) =>
    `${v > 0 ? "+" : v < 0 ? "−" : ""}${row.share ? (100 * Math.abs(v)).toFixed(2) : Math.abs(v).toFixed(4)}`;
  const winner = { first: first.facts.name, second: second.facts.name }[row.better];
  const verdict = winner
    ? el("span", { class: "badge" }, el("span", { class: `swatch ${row.better === "first" ? "a" : "b"}` }), winner)
    : el("span", { class: "undecided", text: "undecided" });
  const cells = [
    show(row.first),
    show(row.second),
    signed(row.difference) + (row.share ? " points" : ""),
    `${signed(row.low)} to ${signed(row.high)}`,
  ];
  return el(
    "tr",
    null,
    el("th", { scope: "row", text: row.name }),
    cells.map((text, k) => el("td", { text, "data-name": heads(first, second)[k + 1] })),
    el("td", { "data-name": "better" }, verdict),
  );
}
