// The page: opens runs, keeps what is chosen, and hands it to the parts.

import { arrays, ask, picture, reason } from "./api.js";
import { choices, coloured, dark, usual } from "./color_scales.js";
import { byId, el, signed, whole } from "./dom.js";
import { Filters } from "./filters.js";
import { Live } from "./identify_panel.js";
import { PointMap } from "./embedding_map.js";
import { showComparison, showNumbers } from "./summary.js";
import { Lists } from "./pair_lists.js";
import { Threshold } from "./threshold_panel.js";
import { showTraining } from "./training_panel.js";

/** @typedef {import("./api.js").View} View */
/** @typedef {"a" | "b"} Key of the first run or the second */
/** @typedef {{map: PointMap, view: View, box: any, card: any, name: any}} Frame a map, and what is around it */

/** @type {View[]} */
const views = []; // by run
/** @type {Record<Key, Frame | null>} */
const maps = { a: null, b: null };
const filters = new Filters(() => filtered());
const lists = new Lists(filters);
const threshold = new Threshold(filters);
/** @type {View | null} */
let first = null;
/** @type {View | null} */
let second = null;

async function start() {
  /** @type {{runs: {name: string, title: string}[], may: import("./identify_panel.js").May | null}} */
  const { runs, may } = await ask("runs");
  const chosen = new URLSearchParams(location.search);
  /** @param {Key} key @param {string} other */
  const known = (key, other) => {
    const asked = chosen.get(key) ?? "";
    return /^\d+$/.test(asked) && runs[Number(asked)] ? asked : other;
  };
  const named = runs.map((run, k) => el("option", { value: k, text: run.name, title: run.title }));
  byId("run-a").replaceChildren(...named);
  byId("run-b").replaceChildren(
    el("option", { value: "", text: "nothing" }),
    ...named.map((option) => option.cloneNode(true)),
  );
  byId("run-a").value = known("a", "0");
  byId("run-b").value = known("b", "");
  byId("run-b").disabled = runs.length < 2;
  for (const id of ["run-a", "run-b"]) byId(id).addEventListener("change", () => open());
  byId("colour").addEventListener("change", () => paint());
  byId("zoom-in").addEventListener("click", () => eachMap((map) => map.zoom(1.5)));
  byId("zoom-out").addEventListener("click", () => eachMap((map) => map.zoom(1 / 1.5)));
  byId("zoom-reset").addEventListener("click", () => eachMap((map) => map.fit()));
  dark.addEventListener("change", () => paint());
  new Live(may, () => first);
  await open();
}

/** @param {(map: PointMap) => void} action */
function eachMap(action) {
  for (const shownIn of Object.values(maps)) if (shownIn) action(shownIn.map);
}

// The runs that are shown.
const shownRuns = () => [first, second].filter((run) => run !== null);

async function open() {
  const [a, b] = [byId("run-a").value, byId("run-b").value];
  const chosen = new URLSearchParams([["a", a], ...(b === "" ? [] : [["b", b]])]);
  history.replaceState(null, "", `?${chosen}${location.hash}`);
  say(`Opening ${byId("run-a").selectedOptions[0].text} …`);
  try {
    const own = await view(Number(a));
    const other = b === "" || b === a ? null : await view(Number(b));
    if (byId("run-a").value !== a || byId("run-b").value !== b) return; // chosen anew meanwhile
    const fresh = own !== first;
    [first, second] = [own, other];
    if (fresh) {
      filters.build(own.facts);
      colours(own.facts);
    }
    summary(own);
    frames();
    filtered();
    threshold.show(own, other);
    showTraining(shownRuns());
    say("");
    for (const each of shownRuns()) if (!each.final) settle(each);
  } catch (error) {
    say("The page could not be drawn.");
    say(reason(error));
  }
}

/** @param {number} index */
async function view(index) {
  if (!views[index]) {
    const facts = await ask(`runs/${index}`);
    const [points, panels] = await Promise.all([
      arrays(`runs/${index}/points`, [["final", false]]),
      ask(`runs/${index}/training`),
    ]);
    views[index] = { index, facts, panels, points: points.arrays, how: points.how, final: points.final };
  }
  return views[index];
}

// Neighbourhoods take a while to lay out the first time; until then the two main directions are shown.
/** @param {View} each */
async function settle(each) {
  each.final = true; // asked for once
  each.waits = true;
  frames();
  const points = await arrays(`runs/${each.index}/points`);
  Object.assign(each, { points: points.arrays, how: points.how, waits: false });
  if (each === first || each === second) frames();
}

/** @param {string} text */
function say(text) {
  byId("status").textContent = text;
  byId("status").hidden = text === "";
  document.body.classList.toggle("ready", text === "");
}

/** @param {View} own */
function summary(own) {
  const { facts } = own;
  document.title = `${facts.name} · mettle workbench`;
  byId("title").textContent = second ? `${facts.name} and ${second.facts.name}` : facts.name;
  byId("about").textContent = second
    ? `${facts.title}; ${second.facts.title}.`
    : `${facts.title}. ${whole(facts.samples)} test samples of ${whole(facts.labels.length)} classes, ` +
      `embedded in ${facts.dimension} dimensions; numbers are of ${facts.scenario.title}.`;
  const warnings = shownRuns()
    .flatMap((v) => v.facts.warnings.map((text) => (second ? `${v.facts.name}: ${text}` : text)));
  byId("warnings").replaceChildren(...warnings.map((text) => el("li", { text })));
  byId("warnings").hidden = !warnings.length;
  if (second) showComparison(own, second);
  else showNumbers(own);
}

/** @param {import("./api.js").RunFacts} facts */
function colours(facts) {
  byId("colour").replaceChildren(...choices(facts).map(({ key, text }) => el("option", { value: key, text })));
  byId("colour").value = usual(facts);
}

const alike = () => second !== null && second.facts.data === first?.facts.data;

// One canvas a run, made anew only when the runs change.
function frames() {
  showFrame("a", first);
  showFrame("b", second);
  byId("maps").classList.toggle("both", Boolean(second));
  /** @type {Record<string, string>} */
  const way = {
    "t-SNE": "what is alike lies together (t-SNE); distances across the map mean little",
    PCA: "the two directions in which embeddings differ most (PCA)",
  };
  const waits = first?.waits || second?.waits ? " Neighbourhoods are being laid out …" : "";
  byId("map-note").textContent = `Every point is a test sample: ${first ? way[first.how] : ""}.${waits}`;
  paint();
}

/** @param {Key} key @param {View | null} shown */
function showFrame(key, shown) {
  if (shown === null) {
    maps[key]?.box.remove();
    maps[key] = null;
    return;
  }
  const { map, name } = (maps[key] ??= frame(key, shown));
  maps[key].view = shown;
  name.replaceChildren(el("span", { class: `swatch ${key}` }), shown.facts.name);
  name.hidden = !second;
  map.setPoints(shown.points.x, shown.points.y, shown.points.label);
}

/** @param {Key} key @param {View} shown @returns {Frame} */
function frame(key, shown) {
  const canvas = el("canvas", {
    id: `canvas-${key}`,
    tabindex: 0,
    role: "application",
    "aria-roledescription": "map",
    "aria-label": "Map of the test samples: arrow keys go from sample to sample",
    "aria-describedby": "map-note",
  });
  const card = el("div", { class: "hover", id: `hover-${key}`, hidden: true });
  const name = el("p", { class: "map-name" });
  const box = el("div", { class: "map-frame" }, name, canvas, card);
  byId("maps").append(box);
  const map = new PointMap(canvas, {
    point: (i, how) => {
      hover(key, i, how);
      const other = maps[key === "a" ? "b" : "a"];
      if (alike() && other) {
        other.map.point(i, false);
        other.card.hidden = true;
      }
    },
    moved: () => move(key),
    enter: (i) => {
      if (first && (key === "a" || alike())) filters.choose(first.points.label[i]);
    },
    clear: () => filters.clear(),
  });
  return { map, view: shown, box, card, name };
}

/** @param {Key} key @param {number} i @param {string} how */
function hover(key, i, how) {
  const shownIn = maps[key];
  if (shownIn === null) return;
  const { card, view: own } = shownIn;
  card.hidden = i < 0;
  if (i < 0) return;
  const { facts, points } = own;
  const label = facts.labels[points.label[i]];
  const rest = facts.columns.map((column, k) => [column.name, column.names[points[`column.${k}`][i]]]);
  const hard = points.difficulty[i];
  if (Number.isFinite(hard)) rest.push(["difficulty", `${signed(hard)}, ${facts.quartiles[points.quartile[i]]}`]);
  const shown =
    facts.kind === "image"
      ? el("img", { class: "picture", src: picture(own, i), alt: `sample ${i}`, width: 88, height: 88 })
      : null;
  card.replaceChildren(
    ...[
      shown,
      el(
        "div",
        null,
        el("b", { class: "who", text: label }),
        el(
          "dl",
          null,
          rest.map(([name, text]) => [el("dt", { text: name }), el("dd", { text })]),
        ),
      ),
    ].filter(Boolean),
  );
  move(key);
  if (how === "keyboard")
    byId("map-said").textContent = [label, ...rest.map(([name, text]) => `${name} ${text}`)].join(", ");
}

// Beside the point, inside the map.
/** @param {Key} key */
function move(key) {
  const shownIn = maps[key];
  if (shownIn === null || shownIn.card.hidden || shownIn.map.current < 0) return;
  const { map, card } = shownIn;
  const [x, y] = map.pixel(map.current);
  const docked = map.width < 560; // no room beside the point: at the end of the map that is further from it
  card.classList.toggle("docked", docked);
  const { offsetWidth: w, offsetHeight: h } = card;
  if (docked) {
    card.style.left = "";
    card.style.top = `${map.canvas.offsetTop + (y > map.height / 2 ? 6 : map.height - h - 6)}px`;
    return;
  }
  const left = x + 18 + w <= map.width ? x + 18 : x - 18 - w;
  card.style.left = `${Math.max(6, Math.min(map.width - w - 6, left))}px`;
  card.style.top = `${map.canvas.offsetTop + Math.max(6, Math.min(map.height - h - 6, y - h / 2))}px`;
}

function paint() {
  const key = byId("colour").value;
  for (const shownIn of Object.values(maps)) {
    if (shownIn === null) continue;
    const own = shownIn.view === first || alike() ? key : "class";
    const { palette, code, legend, note } = coloured(shownIn.view.facts, shownIn.view.points, own);
    shownIn.map.setColours(palette, code);
    if (shownIn.view === first) showLegend(legend, note);
  }
}

/** @param {{colour?: string, ramp?: string[], text: string, last?: string}[]} legend @param {string} note */
function showLegend(legend, note) {
  byId("legend").replaceChildren(
    ...legend.map(({ colour, ramp, text, last }) => {
      if (ramp) {
        const steps = ramp.map((c) => {
          const step = el("span");
          step.style.background = c;
          return step;
        });
        return el(
          "li",
          { class: "ramp" },
          el("span", { class: "steps", "aria-hidden": "true" }, steps),
          el("span", { text }),
          el("span", { text: last }),
        );
      }
      const dot = el("span", { class: "dot", "aria-hidden": "true" });
      dot.style.background = colour ?? "";
      return el("li", null, dot, el("span", { text }));
    }),
  );
  byId("legend-note").textContent = note;
}

function filtered() {
  if (first === null) return;
  const passes = filters.passes(first.points);
  filters.say(
    passes.reduce((a, b) => a + b, 0),
    passes.length,
  );
  maps.a?.map.setPasses(passes);
  if (second) {
    const { points } = second;
    maps.b?.map.setPasses(alike() ? filters.passes(points) : new Uint8Array(points.x.length).fill(1));
  }
  lists.show(first);
  threshold.look();
}

start().catch((error) => {
  say("The page could not be drawn.");
  say(reason(error));
});
