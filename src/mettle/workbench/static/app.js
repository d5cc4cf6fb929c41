// The page: opens runs, keeps what is chosen, and hands it to the parts.

import { arrays, ask, picture, Refused } from "./api.js";
import { choices, coloured, dark, usual } from "./color_scales.js";
import { byId, el, signed, whole } from "./dom.js";
import { Filters } from "./filters.js";
import { Live } from "./identify_panel.js";
import { PointMap } from "./embedding_map.js";
import { showComparison, showNumbers } from "./summary.js";
import { Lists } from "./pair_lists.js";
import { Threshold } from "./threshold_panel.js";
import { showTraining } from "./training_panel.js";

const views = []; // by run: {index, facts, points, how, final, panels, counts}
const maps = { a: null, b: null };
const filters = new Filters(() => filtered());
const lists = new Lists(filters);
const threshold = new Threshold(filters);
let [first, second] = [null, null];

async function start() {
  const { runs, may } = await ask("runs");
  const chosen = new URLSearchParams(location.search);
  const known = (key, other) =>
    /^\d+$/.test(chosen.get(key) ?? "") && runs[chosen.get(key)] ? chosen.get(key) : other;
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

const eachMap = (action) => Object.values(maps).filter(Boolean).forEach(action);

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
    summary();
    frames();
    filtered();
    threshold.show(first, second);
    showTraining([first, second].filter(Boolean));
    say("");
    for (const each of [first, second]) if (each && !each.final) settle(each);
  } catch (error) {
    if (!(error instanceof Refused)) {
      say("The page could not be drawn.");
      throw error;
    }
    say(error.message);
  }
}

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
async function settle(each) {
  each.final = true; // asked for once
  each.waits = true;
  frames();
  const points = await arrays(`runs/${each.index}/points`);
  Object.assign(each, { points: points.arrays, how: points.how, waits: false });
  if (each === first || each === second) frames();
}

function say(text) {
  byId("status").textContent = text;
  byId("status").hidden = text === "";
  document.body.classList.toggle("ready", text === "");
}

function summary() {
  const { facts } = first;
  document.title = `${facts.name} · mettle workbench`;
  byId("title").textContent = second ? `${facts.name} and ${second.facts.name}` : facts.name;
  byId("about").textContent = second
    ? `${facts.title}; ${second.facts.title}.`
    : `${facts.title}. ${whole(facts.samples)} test samples of ${whole(facts.labels.length)} classes, ` +
      `embedded in ${facts.dimension} dimensions; numbers are of ${facts.scenario.title}.`;
  const warnings = [first, second]
    .filter(Boolean)
    .flatMap((v) => v.facts.warnings.map((text) => (second ? `${v.facts.name}: ${text}` : text)));
  byId("warnings").replaceChildren(...warnings.map((text) => el("li", { text })));
  byId("warnings").hidden = !warnings.length;
  if (second) showComparison(first, second);
  else showNumbers(first);
}

function colours(facts) {
  byId("colour").replaceChildren(...choices(facts).map(({ key, text }) => el("option", { value: key, text })));
  byId("colour").value = usual(facts);
}

const alike = () => second && second.facts.data === first.facts.data;

// One canvas a run, made anew only when the runs change.
function frames() {
  const shown = { a: first, b: second };
  for (const key of ["a", "b"]) {
    if (!shown[key]) {
      maps[key]?.frame_.remove();
      maps[key] = null;
    } else {
      maps[key] ??= frame(key);
      maps[key].view_ = shown[key];
      maps[key].name_.replaceChildren(el("span", { class: `swatch ${key}` }), shown[key].facts.name);
      maps[key].name_.hidden = !second;
      maps[key].setPoints(shown[key].points.x, shown[key].points.y, shown[key].points.label);
    }
  }
  byId("maps").classList.toggle("both", Boolean(second));
  const way = {
    "t-SNE": "what is alike lies together (t-SNE); distances across the map mean little",
    PCA: "the two directions in which embeddings differ most (PCA)",
  };
  const waits = first.waits || second?.waits ? " Neighbourhoods are being laid out …" : "";
  byId("map-note").textContent = `Every point is a test sample: ${way[first.how]}.${waits}`;
  paint();
}

function frame(key) {
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
      if (alike()) {
        const other = maps[key === "a" ? "b" : "a"];
        other.point(i, false);
        other.card_.hidden = true;
      }
    },
    moved: () => move(key),
    enter: (i) => {
      if (key === "a" || alike()) filters.choose(first.points.label[i]);
    },
    clear: () => filters.clear(),
  });
  return Object.assign(map, { frame_: box, card_: card, name_: name });
}

function hover(key, i, how) {
  const { card_: card, view_: own } = maps[key];
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
function move(key) {
  const map = maps[key];
  if (map.card_.hidden || map.current < 0) return;
  const [x, y] = map.pixel(map.current);
  const docked = map.width < 560; // no room beside the point: at the end of the map that is further from it
  map.card_.classList.toggle("docked", docked);
  const { offsetWidth: w, offsetHeight: h } = map.card_;
  if (docked) {
    map.card_.style.left = "";
    map.card_.style.top = `${map.canvas.offsetTop + (y > map.height / 2 ? 6 : map.height - h - 6)}px`;
    return;
  }
  const left = x + 18 + w <= map.width ? x + 18 : x - 18 - w;
  map.card_.style.left = `${Math.max(6, Math.min(map.width - w - 6, left))}px`;
  map.card_.style.top = `${map.canvas.offsetTop + Math.max(6, Math.min(map.height - h - 6, y - h / 2))}px`;
}

function paint() {
  const key = byId("colour").value;
  for (const map of Object.values(maps).filter(Boolean)) {
    const own = map.view_ === first || alike() ? key : "class";
    const { palette, code, legend, note } = coloured(map.view_.facts, map.view_.points, own);
    map.setColours(palette, code);
    if (map.view_ === first) showLegend(legend, note);
  }
}

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
      dot.style.background = colour;
      return el("li", null, dot, el("span", { text }));
    }),
  );
  byId("legend-note").textContent = note;
}

function filtered() {
  const passes = filters.passes(first.points);
  filters.say(
    passes.reduce((a, b) => a + b, 0),
    passes.length,
  );
  maps.a.setPasses(passes);
  maps.b?.setPasses(alike() ? filters.passes(second.points) : new Uint8Array(second.points.x.length).fill(1));
  lists.show(first);
  threshold.look();
}

start().catch((error) => {
  say(error instanceof Refused ? error.message : "The page could not be drawn.");
  if (!(error instanceof Refused)) throw error;
});
