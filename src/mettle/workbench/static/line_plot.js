// Line plots in SVG, drawn at the width they have, so that text keeps its size on a phone.

import { el, svg } from "./dom.js";

const PAD = { left: 52, right: 24, top: 10, bottom: 40 };

/** @typedef {{at: number, text: string}} Tick */
/** @typedef {{low: number, high: number, ticks: Tick[], label?: string}} Axis */
/** @typedef {{points: [number, number][], run: string, dashed?: boolean, name?: string}} Line of run "a" or "b" */
/** @typedef {{x: Axis, y: Axis, lines: Line[]}} Content */

/** @type {Content} */
const NOTHING = { x: { low: 0, high: 1, ticks: [] }, y: { low: 0, high: 1, ticks: [] }, lines: [] };

export class Plot {
  /** @param {{title: string, height?: number, describe?: string}} given */
  constructor({ title, height = 280, describe = "" }) {
    this.height = height;
    this.width = 0;
    this.content = NOTHING;
    /** @type {[number, number] | null} */
    this.dot = null;
    this.point = null;
    this.canvas = svg("svg", { class: "plot", role: "img", "aria-label": describe || title });
    this.box = el("div", { class: "plot-box" }, this.canvas);
    new ResizeObserver(() => this.draw()).observe(this.box);
  }

  /** @param {Content} content */
  set(content) {
    this.content = content;
    this.draw();
  }

  // A dot that moves without drawing everything again.
  /** @param {number} x @param {number} y */
  mark(x, y) {
    this.dot = [x, y];
    if (!this.point) return;
    const seen = inside(x, this.content.x) && inside(y, this.content.y);
    this.point.setAttribute("visibility", seen ? "visible" : "hidden");
    if (!seen) return;
    this.point.setAttribute("cx", this.px(x));
    this.point.setAttribute("cy", this.py(y));
  }

  /** @param {number} x */
  px(x) {
    const { low, high } = this.content.x;
    return PAD.left + ((x - low) / (high - low || 1)) * (this.width - PAD.left - PAD.right);
  }

  /** @param {number} y */
  py(y) {
    const { low, high } = this.content.y;
    return this.height - PAD.bottom - ((y - low) / (high - low || 1)) * (this.height - PAD.top - PAD.bottom);
  }

  draw() {
    this.width = this.box.clientWidth;
    if (this.content === NOTHING || this.width < 60) return;
    const { x, y, lines } = this.content;
    const [left, right, top, bottom] = [PAD.left, this.width - PAD.right, PAD.top, this.height - PAD.bottom];
    const parts = [];
    for (const { at, text } of apart(y.ticks, (t) => this.py(t.at), 22)) {
      parts.push(svg("line", { class: "grid", x1: left, x2: right, y1: this.py(at), y2: this.py(at) }));
      parts.push(svg("text", { class: "tick", x: left - 7, y: this.py(at) + 4, "text-anchor": "end", text }));
    }
    for (const { at, text } of apart(x.ticks, (t) => this.px(t.at), 46)) {
      parts.push(svg("line", { class: "grid", x1: this.px(at), x2: this.px(at), y1: top, y2: bottom }));
      parts.push(svg("text", { class: "tick", x: this.px(at), y: bottom + 16, "text-anchor": "middle", text }));
    }
    if (x.label)
      parts.push(
        svg("text", {
          class: "axis",
          x: (left + right) / 2,
          y: this.height - 6,
          "text-anchor": "middle",
          text: x.label,
        }),
      );
    for (const line of lines) parts.push(this.path(line));
    this.point = svg("circle", { class: "dot", r: 6, visibility: "hidden" });
    this.canvas.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.canvas.setAttribute("height", this.height);
    this.canvas.replaceChildren(...parts, this.point);
    if (this.dot) this.mark(...this.dot);
  }

  /** @param {Line} line */
  path({ points, run, dashed }) {
    const { x, y } = this.content;
    const d = points
      .filter(([a, b]) => inside(a, x) && inside(b, y))
      .map(([a, b], k) => `${k ? "L" : "M"}${this.px(a).toFixed(1)} ${this.py(b).toFixed(1)}`);
    return svg("path", { class: `line ${run}${dashed ? " dashed" : ""}`, d: d.join("") });
  }
}

/** @param {number} value @param {Axis} axis */
const inside = (value, { low, high }) => value >= low - 1e-9 && value <= high + 1e-9; // NaN is nowhere

// Ticks that leave each other room.
/** @param {Tick[]} ticks @param {(tick: Tick) => number} place @param {number} room */
function apart(ticks, place, room) {
  /** @type {Tick[]} */
  const found = [];
  for (const tick of ticks) {
    if (found.every((other) => Math.abs(place(other) - place(tick)) >= room)) found.push(tick);
  }
  return found;
}

// Round ticks over a range.
/** @param {number} v */
const short = (v) => String(Number(v.toPrecision(6)));

/** @param {number} low @param {number} high @param {number} count @param {(v: number) => string} text */
export function rounded(low, high, count = 6, text = short) {
  const raw = (high - low || 1) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= raw) ?? 10 * power;
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k += 1)
    found.push({ at: k * step, text: text(k * step) });
  return found;
}
