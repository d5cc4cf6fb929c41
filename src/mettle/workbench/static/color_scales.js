// What a point's colour says. Okabe and Ito's eight colours stay apart for every kind of colour vision.

import { signed } from "./dom.js";

const NAMED = ["#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#B8A500", "#8a8a8a"];
const NAMED_DARK = ["#4aa3e0", "#e6a526", "#1fbf92", "#f07f3c", "#dc8fba", "#9fd8f8", "#d8ca45", "#a3a3a3"];
export const dark = matchMedia("(prefers-color-scheme: dark)");
const MANY = Array.from(
  { length: 24 },
  (_, k) => `hsl(${(k * 137.5) % 360} ${k % 2 ? 62 : 75}% ${k % 3 ? 52 : 42}%)`,
);
const RAMP = ["#2166ac", "#3f86bd", "#6aa7cd", "#93bcc9", "#c9b48c", "#e39a4f", "#d9702a", "#b93c0c"];

/** @typedef {{labels: string[], columns: {name: string, names: string[]}[]}} Facts */
/** @typedef {Record<string, Uint32Array | Float32Array>} Points `label`, `difficulty`, `column.0`, ... of every sample */

// [{key, text}] of everything that a run can be coloured by.
/** @param {Facts} facts */
export function choices(facts) {
  const found = [{ key: "class", text: "class" }];
  facts.columns.forEach((column, k) => found.push({ key: `column.${k}`, text: column.name }));
  found.push({ key: "difficulty", text: "difficulty" });
  return found;
}

/** @param {Facts} facts */
export const usual = (facts) => (facts.columns.length ? "column.0" : "class");

// One palette entry per point, and the legend: {palette, code, legend: [{colour, text}], note}
/** @param {Facts} facts @param {Points} points @param {string} key */
export function coloured(facts, points, key) {
  if (key === "difficulty") return byDifficulty(points);
  const own = key === "class";
  const names = own ? facts.labels : facts.columns[Number(key.split(".")[1])].names;
  const codes = own ? points.label : points[key];
  if (names.length <= NAMED.length) {
    const palette = dark.matches ? NAMED_DARK : NAMED;
    const legend = names.map((text, k) => ({ colour: palette[k], text: text || "(empty)" }));
    return { palette, code: codes, legend, note: "" };
  }
  const note = own
    ? `${names.length.toLocaleString("en")} classes: colours repeat; go to a point and its whole class stands out.`
    : `${names.length.toLocaleString("en")} values: colours repeat.`;
  return { palette: MANY, code: codes.map((c) => c % MANY.length), legend: [], note };
}

/** @param {Points} points */
function byDifficulty(points) {
  const hard = points.difficulty;
  const sorted = Float32Array.from(hard).sort();
  const low = sorted[Math.floor(0.02 * (sorted.length - 1))];
  const high = sorted[Math.ceil(0.98 * (sorted.length - 1))];
  const span = high - low || 1;
  const top = RAMP.length - 1;
  const code = Uint32Array.from(hard, (h) =>
    Number.isFinite(h) ? Math.max(0, Math.min(top, Math.floor(((h - low) / span) * RAMP.length))) : top,
  );
  const legend = [{ ramp: RAMP, text: `easy ${signed(low)}`, last: `${signed(high)} hard` }];
  const note =
    "Difficulty: cosine of the nearest stranger less that of the nearest relative; above 0 the stranger is nearer.";
  return { palette: RAMP, code, legend: Number.isFinite(low) ? legend : [], note };
}
