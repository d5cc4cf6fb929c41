// One set of filters for the map and every list: class, domain and groups, difficulty.

import { byId, el, later, plural, whole } from "./dom.js";

const OFFERED = 2000; // names that the class field suggests

/** @typedef {import("./api.js").RunFacts} RunFacts */

export class Filters {
  /** @param {() => void} changed what the page does then */
  constructor(changed) {
    this.changed = changed;
    /** @type {string[]} */
    this.labels = [];
    /** @type {string[]} */
    this.lower = [];
    /** @type {Map<string, number>} */
    this.codes = new Map();
    /** @type {HTMLSelectElement[]} */
    this.columns = [];
    this.text = el("input");
    this.quartile = el("select");
    this.clear = this.clear.bind(this);
    byId("filter-clear").addEventListener("click", () => {
      this.clear();
      byId("filter-class").focus();
    });
    this.typed = later(250, () => this.changed());
  }

  /** @param {RunFacts} facts */
  build(facts) {
    this.labels = facts.labels;
    this.lower = facts.labels.map((name) => name.toLowerCase());
    this.codes = new Map(facts.labels.map((name, code) => [name, code]));
    const names = el("datalist", { id: "classes" });
    names.append(...facts.labels.slice(0, OFFERED).map((name) => el("option", { value: name })));
    this.text = el("input", {
      id: "filter-class",
      type: "search",
      list: "classes",
      autocomplete: "off",
      maxlength: 200,
      placeholder: `any of ${whole(facts.labels.length)}`,
      oninput: () => this.typed(),
    });
    this.columns = facts.columns.map((column, k) => this.select(`filter-column-${k}`, column.names));
    this.quartile = this.select("filter-quartile", facts.quartiles);
    const fields = [
      ["Class", this.text],
      ...facts.columns.map((c, k) => [c.name, this.columns[k]]),
      ["Difficulty", this.quartile],
    ];
    byId("filter-fields").replaceChildren(
      names,
      ...fields.map(([name, field]) =>
        el("div", { class: "field" }, el("label", { for: field.id, text: name }), field),
      ),
    );
  }

  /** @param {string} id @param {string[]} names */
  select(id, names) {
    const any = el("option", { value: "", text: "any" });
    const options = names.map((name, code) => el("option", { value: code, text: name || "(empty)" }));
    return el("select", { id, onchange: () => this.changed() }, any, options);
  }

  // A class is meant exactly when the text is its name; otherwise every class that has the text in its name.
  get label() {
    return this.codes.get(this.text.value);
  }
  get part() {
    return this.label === undefined ? this.text.value.trim() : "";
  }
  get active() {
    return this.text.value.trim() !== "" || this.quartile.value !== "" || this.columns.some((s) => s.value !== "");
  }

  /** @param {number} label */
  choose(label) {
    this.text.value = this.labels[label];
    this.changed();
  }

  clear() {
    this.typed.cancel();
    this.text.value = "";
    for (const field of [this.quartile, ...this.columns]) field.value = "";
    this.changed();
  }

  // For the service.
  query() {
    /** @type {[string, any][]} */
    const found = [];
    if (this.label !== undefined) found.push(["label", this.label]);
    else if (this.part) found.push(["text", this.part]);
    if (this.quartile.value !== "") found.push(["quartile", this.quartile.value]);
    this.columns.forEach((field, k) => {
      if (field.value !== "") found.push(["column", k], ["value", field.value]);
    });
    return found;
  }

  // For the map: one byte per sample.
  /** @param {import("./api.js").PointArrays} points */
  passes(points) {
    const n = points.label.length;
    const keep = new Uint8Array(n).fill(1);
    /** @param {ArrayLike<number>} codes @param {number} wanted */
    const only = (codes, wanted) => {
      for (let i = 0; i < n; i += 1) if (codes[i] !== wanted) keep[i] = 0;
    };
    const part = this.part.toLowerCase();
    if (this.label !== undefined) only(points.label, this.label);
    else if (part) {
      const has = this.lower.map((name) => name.includes(part));
      for (let i = 0; i < n; i += 1) if (!has[points.label[i]]) keep[i] = 0;
    }
    if (this.quartile.value !== "") only(points.quartile, Number(this.quartile.value));
    this.columns.forEach((field, k) => {
      if (field.value !== "") only(points[`column.${k}`], Number(field.value));
    });
    return keep;
  }

  /** @param {number} kept @param {number} all */
  say(kept, all) {
    byId("filter-count").textContent = this.active
      ? `${whole(kept)} of ${plural(all, "sample", "samples")}`
      : plural(all, "sample", "samples");
    byId("filter-clear").hidden = !this.active;
  }
}
