// Pairs of pictures with their score, and the three lists of what is hard.

import { ask, picture, reason } from "./api.js";
import { byId, el, newest, percent, plural } from "./dom.js";

const FIRST = 6; // pairs shown before one asks for more
const MOST = 96;

const LISTS = [
  {
    kind: "positives",
    title: "Hardest positives",
    lede: "One identity, yet far apart: the lowest scores.",
    none: "No genuine pair passes the filters.",
  },
  {
    kind: "negatives",
    title: "Hardest negatives",
    lede: "Two identities, yet alike: the highest scores.",
    none: "No impostor pair passes the filters.",
  },
  {
    kind: "labels",
    title: "Suspected labels",
    lede: "The left one fits the class of the right one better.",
    none: "No sample that passes the filters fits another class better than its own.",
  },
];

/** @typedef {import("./api.js").View} View */
/** @typedef {{first: number, second: number, score: number, suspicion?: number}} Pair samples */
/** @typedef {{pairs: Pair[], looked: number, total?: number}} Found `looked` is a share of all pairs */
/** @typedef {{kind: string, none: string, items: any, note: any, more: any, box: any, count: number,
 *   turn: (asked: Promise<Found>) => Promise<Found | undefined>}} Part one list on the page */

// One sample: its picture, or a tile where there is none, and what it is called.
/** @param {View} view @param {number} sample */
function side(view, sample) {
  const { facts, points } = view;
  const label = facts.labels[points.label[sample]];
  const rest = facts.columns.map((column, k) => column.names[points[`column.${k}`][sample]]).filter(Boolean);
  const shown =
    facts.kind === "image"
      ? el("img", {
          class: "picture",
          src: picture(view, sample),
          alt: `sample ${sample}`,
          loading: "lazy",
          width: 64,
          height: 64,
        })
      : el("span", { class: "row-tile", text: `#${sample}`, "aria-hidden": "true" });
  return el(
    "div",
    { class: "side", title: [label, ...rest].join("\n") },
    shown,
    el("span", { class: "who", text: label }),
    el("span", { class: "where", text: rest[0] ?? "" }),
  );
}

/** @param {View} view @param {Pair} pair */
export function pairItem(view, pair) {
  const extra =
    pair.suspicion === undefined
      ? null
      : el("span", {
          class: "extra",
          title: "mean cosine to the other class, less that to its own",
          text: `fits +${pair.suspicion.toFixed(2)}`,
        });
  return el(
    "li",
    { class: "pair", "data-score": pair.score },
    side(view, pair.first),
    side(view, pair.second),
    el("div", { class: "score" }, el("b", { text: pair.score.toFixed(3) }), extra),
  );
}

export class Lists {
  /** @param {import("./filters.js").Filters} filters */
  constructor(filters) {
    this.filters = filters;
    /** @type {View | null} */
    this.view = null;
    this.parts = LISTS.map((list) => {
      const items = el("ul", { class: "pair-list" });
      const note = el("p", { class: "note", role: "status" });
      const more = el("button", { type: "button", class: "quiet more", text: "Show more", hidden: true });
      /** @type {Part} */
      const part = { ...list, items, note, more, count: FIRST, turn: newest(), box: null };
      more.addEventListener("click", () => {
        part.count = Math.min(MOST, part.count * 2);
        this.fetch(part);
      });
      part.box = el(
        "section",
        { class: "list card", id: `list-${list.kind}`, "aria-label": list.title },
        el("h3", { text: list.title }),
        el("p", { class: "note", text: list.lede }),
        items,
        note,
        more,
      );
      return part;
    });
    byId("lists").replaceChildren(...this.parts.map((part) => part.box));
  }

  /** @param {View} view */
  show(view) {
    this.view = view;
    byId("pairs-note").textContent =
      `Of ${view.facts.scenario.title}; scores are cosines. ` +
      "With filters on, a pair stays when one of its two samples passes.";
    for (const part of this.parts) {
      part.count = FIRST;
      this.fetch(part);
    }
  }

  /** @param {Part} part */
  async fetch(part) {
    const view = this.view;
    if (view === null) return;
    part.box.setAttribute("aria-busy", "true");
    try {
      /** @type {[string, any][]} */
      const query = [["count", part.count], ...this.filters.query()];
      const found = await part.turn(ask(`runs/${view.index}/pairs/${part.kind}`, query));
      if (!found || view !== this.view) return;
      part.items.replaceChildren(...found.pairs.map((pair) => pairItem(view, pair)));
      part.note.textContent = this.said(part, found);
      part.more.hidden = found.pairs.length < part.count || part.count >= MOST;
    } catch (error) {
      part.note.textContent = reason(error);
      part.items.replaceChildren();
      part.more.hidden = true;
    }
    part.box.removeAttribute("aria-busy");
  }

  /** @param {Part} part @param {Found} found */
  said(part, found) {
    if (!found.pairs.length) return part.none;
    if (found.total !== undefined) {
      const fit = plural(found.total, "sample fits", "samples fit");
      return `${fit} another class better; a ranking to look at, not a verdict.`;
    }
    return found.looked < 1 ? `Found among ${percent(found.looked)} of the pairs.` : "";
  }
}
