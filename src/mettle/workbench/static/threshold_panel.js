// ROC and DET, and a threshold that one can move: counts are whole numbers of the service, pictures the closest calls.

import { arrays, ask, reason } from "./api.js";
import { byId, el, later, newest, percent, svg, whole } from "./dom.js";
import { pairItem } from "./pair_lists.js";
import { Plot, rounded } from "./line_plot.js";

const SHOWN = 6;
const SIDES = [
  {
    kind: "accepts",
    title: "False accepts",
    of: "impostor pairs",
    lede: "Two identities, accepted. The closest to the threshold first.",
  },
  {
    kind: "rejects",
    title: "False rejects",
    of: "genuine pairs",
    lede: "One identity, rejected. The closest to the threshold first.",
  },
];

/** @typedef {import("./api.js").View} View */
/** @typedef {{accepts: number, rejects: number}} Errors impostor pairs accepted, genuine ones rejected */
/** @typedef {Errors & {threshold: number, name: string, title: string}} Mark */
/** @typedef {{genuine: number, impostor: number, marks: Mark[], ticks: {rate: number, at: number}[],
 *   arrays: Record<string, any>}} Counts of a run: `threshold`, `accepts`, `rejects`, and the points of its curves */
/** @typedef {{kind: string, title: string, of: string, lede: string}} Side */

/** @type {Counts} */
const NONE = {
  genuine: 0,
  impostor: 0,
  marks: [],
  ticks: [],
  arrays: { threshold: [0, 1], accepts: [0, 0], rejects: [0, 0], "at.x": [0, 0], "at.y": [0, 0] },
};

export class Threshold {
  /** @param {import("./filters.js").Filters} filters */
  constructor(filters) {
    this.filters = filters;
    /** @type {View | null} */
    this.view = null;
    this.data = NONE;
    this.threshold = this.first = this.asked = 0;
    this.bins = 1;
    this.places = 3;
    this.cut = svg("line");
    this.look = later(140, () => this.pictures());
    this.turn = newest();
    this.roc = new Plot({ title: "ROC: true-accept rate over false-accept rate" });
    this.det = new Plot({ title: "DET: false-reject rate over false-accept rate" });
    this.strip = svg("svg", { class: "strip", "aria-hidden": "true", preserveAspectRatio: "none" });
    this.slider = el("input", {
      id: "slider",
      type: "range",
      min: 0,
      max: 1,
      value: 0,
      step: 1,
      oninput: () => this.slid(),
    });
    this.exact = el("input", {
      id: "exact",
      type: "number",
      step: "any",
      inputmode: "decimal",
      onchange: () => this.typed(),
    });
    this.marks = el("div", { class: "marks", role: "group", "aria-label": "Named thresholds" });
    /** @type {Record<string, ReturnType<Threshold["side"]>>} */
    this.boxes = Object.fromEntries(SIDES.map((side) => [side.kind, this.side(side)]));
    this.body = el(
      "div",
      null,
      el(
        "div",
        { class: "two" },
        figure("ROC", "True accepts over false accepts; the upper left is best.", this.roc),
        figure("DET", "Both errors on normal-deviate axes; the lower left is best.", this.det),
      ),
      el(
        "div",
        { class: "control card" },
        el(
          "div",
          { class: "control-head" },
          el("label", { for: "slider", text: "Threshold" }),
          this.exact,
          this.marks,
        ),
        el("div", { class: "track" }, this.strip, this.slider),
        el(
          "p",
          { class: "note track-note" },
          el("span", { class: "key genuine", text: "genuine pairs" }),
          el("span", { class: "key impostor", text: "impostor pairs" }),
          el("span", { text: "by score, each kind drawn to its own height. Accepted: at or right of the line." }),
        ),
      ),
      el(
        "div",
        { class: "two" },
        SIDES.map((side) => this.boxes[side.kind].box),
      ),
    );
    this.exact.setAttribute("aria-label", "Threshold, exactly");
  }

  /** @param {Side} side */
  side({ kind, title, of, lede }) {
    const count = el("output", { id: kind, class: "count", for: "slider", "aria-live": "polite" });
    const rate = el("span", { class: "rate" });
    const items = el("ul", { class: "pair-list" });
    const note = el("p", { class: "note" });
    const box = el(
      "section",
      { class: "list card", "aria-label": title },
      el("div", { class: "count-head" }, el("h3", { text: title }), el("p", null, count, " ", rate)),
      el("p", { class: "note", text: lede }),
      items,
      note,
    );
    return { box, count, rate, items, note, of };
  }

  /** @param {View} view @param {View | null} other */
  async show(view, other) {
    this.view = view;
    const mine = await this.turn(Promise.all([this.load(view), other ? this.load(other) : null]));
    if (!mine) return;
    const [own, second] = mine;
    const note = byId("threshold-note");
    if (typeof own === "string") {
      note.textContent = own;
      byId("threshold-body").replaceChildren();
      return;
    }
    this.data = own;
    note.textContent =
      `${upper(view.facts.scenario.title)}: ${whole(own.genuine)} genuine and ${whole(own.impostor)} impostor pairs, ` +
      "every one counted. Counts are over all pairs; the pictures below follow the filters.";
    byId("threshold-body").replaceChildren(this.body);
    this.curves(second === null || typeof second === "string" ? [own] : [own, second]);
    this.draw();
    const t = own.arrays.threshold;
    this.slider.max = t.length - 1;
    this.places = Math.max(3, Math.round(-Math.log10(t[1] - t[0])));
    this.marks.replaceChildren(
      ...own.marks.map((/** @type {Mark} */ mark) =>
        el("button", {
          type: "button",
          class: "chip",
          title: mark.title,
          text: mark.name,
          onclick: () => this.at(mark.threshold, mark),
        }),
      ),
    );
    const start = own.marks.length ? own.marks[0] : null;
    this.at(start === null ? t[Math.floor(t.length / 2)] : start.threshold, start);
  }

  // Counts of a run, or why there are none.
  /** @param {View} view @returns {Promise<Counts | string>} */
  async load(view) {
    try {
      view.counts ??= await arrays(`runs/${view.index}/counts`);
      return view.counts;
    } catch (error) {
      return reason(error);
    }
  }

  /** @param {Counts[]} runs */
  curves(runs) {
    const lowest = Math.max(
      1e-7,
      Math.min(
        ...runs.map((run) => run.arrays["curve.fmr"].filter((/** @type {number} */ v) => v > 0).reduce(least, 1)),
      ),
    );
    const first = Math.min(-1, Math.ceil(Math.log10(lowest)));
    const decades = Array.from({ length: -first + 1 }, (_, k) => ({
      at: first + k,
      text: percentOf(10 ** (first + k)),
    })).reverse();
    this.first = first;
    this.roc.set({
      x: { low: first, high: 0, ticks: decades, label: "false-accept rate" },
      y: { low: 0, high: 1, ticks: rounded(0, 1, 5, percentOf) },
      lines: runs
        .map((run, k) => ({
          run: "ab"[k],
          points: zip(
            run.arrays["curve.fmr"],
            run.arrays["curve.fnmr"],
            (v) => (v > 0 ? Math.log10(v) : NaN),
            (v) => 1 - v,
          ),
        }))
        .reverse(),
    });
    const ticks = runs[0].ticks;
    /** @param {number} rate */
    const at = (rate) => ticks.find((tick) => tick.rate === rate)?.at ?? NaN;
    const known = ticks.filter((tick) => tick.rate >= Math.min(lowest, 0.01) && tick.rate <= 0.95);
    const shown = known.map((tick) => ({ at: tick.at, text: percentOf(tick.rate) }));
    this.det.set({
      x: {
        low: known[0].at,
        high: at(0.6),
        ticks: shown.filter((tick) => tick.at <= at(0.6)),
        label: "false-accept rate",
      },
      y: {
        low: at(1e-3),
        high: at(0.99),
        ticks: ticks
          .filter((tick) => tick.rate >= 1e-3)
          .map((tick) => ({ at: tick.at, text: percentOf(tick.rate) })),
      },
      lines: runs
        .map((run, k) => ({ run: "ab"[k], points: zip(run.arrays["curve.x"], run.arrays["curve.y"]) }))
        .reverse(),
    });
  }

  // Both score distributions behind the slider, from the counts themselves.
  draw() {
    const { accepts, rejects } = this.data.arrays;
    const n = accepts.length;
    const bins = Math.min(120, n - 1);
    /** @param {(low: number, high: number) => number} part */
    const shape = (part) => {
      const heights = Array.from({ length: bins }, (_, k) => {
        const [low, high] = [Math.floor((k * (n - 1)) / bins), Math.floor(((k + 1) * (n - 1)) / bins)];
        return part(low, high) / Math.max(1, high - low);
      });
      const top = Math.max(...heights, 1e-12);
      const steps = heights.map(
        (h, k) => `L${k} ${(40 - (38 * h) / top).toFixed(2)}L${k + 1} ${(40 - (38 * h) / top).toFixed(2)}`,
      );
      return `M0 40${steps.join("")}L${bins} 40Z`;
    };
    this.strip.setAttribute("viewBox", `0 0 ${bins} 40`);
    this.cut = svg("line", { class: "cut", y1: 0, y2: 40, "vector-effect": "non-scaling-stroke" });
    this.bins = bins;
    this.strip.replaceChildren(
      svg("path", { class: "impostor", d: shape((low, high) => accepts[low] - accepts[high]) }),
      svg("path", { class: "genuine", d: shape((low, high) => rejects[high] - rejects[low]) }),
      this.cut,
    );
  }

  slid() {
    const k = Number(this.slider.value);
    const { threshold, accepts, rejects } = this.data.arrays;
    this.at(threshold[k], { accepts: accepts[k], rejects: rejects[k] });
  }

  async typed() {
    const value = Number(this.exact.value);
    if (this.exact.value === "" || !Number.isFinite(value)) {
      this.exact.value = this.text(this.threshold);
      return;
    }
    const view = this.view;
    if (view === null) return;
    const counts = await ask(`runs/${view.index}/at`, [["threshold", value]]);
    if (view === this.view) this.at(value, counts);
  }

  /** @param {number} value */
  text(value) {
    return value.toFixed(
      this.places + (Math.abs(value * 10 ** this.places - Math.round(value * 10 ** this.places)) > 1e-6 ? 3 : 0),
    );
  }

  // Everything that depends on the threshold; counts come with it, or are those of the nearest position.
  /** @param {number} threshold @param {Errors | null} counts */
  at(threshold, counts) {
    const t = this.data.arrays.threshold;
    const step = (t[t.length - 1] - t[0]) / (t.length - 1);
    const k = Math.max(0, Math.min(t.length - 1, Math.round((threshold - t[0]) / step)));
    const { accepts, rejects } = counts ?? {
      accepts: this.data.arrays.accepts[k],
      rejects: this.data.arrays.rejects[k],
    };
    this.threshold = threshold;
    this.slider.value = k;
    this.slider.setAttribute("aria-valuetext", this.text(threshold));
    this.exact.value = this.text(threshold);
    const x = Math.max(0, Math.min(this.bins, ((threshold - t[0]) / (t[t.length - 1] - t[0])) * this.bins));
    this.cut.setAttribute("x1", x);
    this.cut.setAttribute("x2", x);
    const [fmr, fnmr] = [accepts / this.data.impostor, rejects / this.data.genuine];
    this.count("accepts", accepts, fmr, this.data.impostor);
    this.count("rejects", rejects, fnmr, this.data.genuine);
    this.roc.mark(Math.max(this.first, Math.log10(fmr)), 1 - fnmr);
    this.det.mark(this.data.arrays["at.x"][k], this.data.arrays["at.y"][k]);
    for (const [n, chip] of [...this.marks.children].entries()) {
      chip.setAttribute("aria-pressed", String(this.data.marks[n].threshold === threshold));
    }
    this.look();
  }

  /** @param {string} kind @param {number} count @param {number} share @param {number} all */
  count(kind, count, share, all) {
    const box = this.boxes[kind];
    box.count.textContent = whole(count);
    box.count.dataset.count = count;
    box.rate.textContent = `of ${whole(all)} ${box.of} (${percent(share)})`;
  }

  async pictures() {
    const { view, threshold } = this;
    if (view === null || this.data === NONE) return;
    const mine = ++this.asked;
    for (const { kind } of SIDES) {
      const box = this.boxes[kind];
      /** @type {[string, any][]} */
      const query = [["threshold", threshold], ["count", SHOWN], ...this.filters.query()];
      try {
        const found = await ask(`runs/${view.index}/pairs/${kind}`, query);
        if (mine !== this.asked) return; // asked anew meanwhile
        box.items.dataset.threshold = threshold;
        box.items.replaceChildren(...found.pairs.map((/** @type {any} */ pair) => pairItem(view, pair)));
        box.note.textContent = found.pairs.length
          ? found.looked < 1
            ? `Found among ${percent(found.looked)} of the pairs.`
            : ""
          : "None.";
      } catch (error) {
        box.note.textContent = reason(error);
      }
    }
  }
}

/** @param {number} a @param {number} b */
const least = (a, b) => Math.min(a, b);

/** @param {number} v */
const same = (v) => v;

// Points of a curve, each coordinate by its own scale.
/** @typedef {(v: number) => number} Scale */
/** @type {(xs: ArrayLike<number>, ys: ArrayLike<number>, fx?: Scale, fy?: Scale) => [number, number][]} */
const zip = (xs, ys, fx = same, fy = fx) => Array.from(xs, (x, k) => [fx(x), fy(ys[k])]);

/** @param {string} text */
const upper = (text) => text.charAt(0).toUpperCase() + text.slice(1);
/** @param {number} v */
const percentOf = (v) => `${Number((100 * v).toPrecision(4))} %`;

/** @param {string} title @param {string} caption @param {Plot} plot */
const figure = (title, caption, plot) =>
  el(
    "figure",
    { class: "panel card" },
    el("div", { class: "panel-head" }, el("h3", { text: title })),
    plot.box,
    el("figcaption", { class: "note", text: caption }),
  );
