// A picture dropped or chosen is shown to the gallery: who is it, or is it who it claims to be?

import { picture, Refused, told } from "./api.js";
import { byId, el, percent } from "./dom.js";

/** @typedef {import("./api.js").View} View */
/** @typedef {{identify: boolean, verify: boolean}} May which questions the key of this session has the scope for */
/** @typedef {{identity: string, score: number | null, match: boolean}} Candidate */
/** @typedef {{threshold: number | null, far?: number | null, per?: string | null, false_matches?: number | null,
 *   false_accepts?: number | null}} Point a threshold, and what is known of it */
/** @typedef {Point & {match: string | null, candidates: Candidate[]}} Identified */
/** @typedef {Point & Candidate} Verified */

// What is said of a probe that matches nobody.
/** @param {Point} point */
const refusal = ({ threshold }) => (threshold === null ? "Not calibrated" : "No match");

export class Live {
  /**
   * @param {May | null} may null where there is no service around the page
   * @param {() => View | null} view the run that is shown
   */
  constructor(may, view) {
    byId("live").hidden = may === null;
    this.may = may ?? { identify: false, verify: false };
    this.view = view;
    /** @type {File | null} */
    this.picture = null;
    if (may === null) return;
    if (!may.identify && !may.verify) {
      const text = "The key that signed in here may look but not ask: it needs the scope identify, or verify.";
      byId("live-body").replaceChildren(el("p", { class: "note", text }));
      return;
    }
    this.file = el("input", {
      id: "live-file",
      type: "file",
      accept: "image/*",
      onchange: () => this.take(this.file.files[0]),
    });
    this.claim = el("input", {
      id: "live-claim",
      type: "text",
      autocomplete: "off",
      maxlength: 1000,
      placeholder: !may.identify ? "a name is needed: this key may only verify" : "nobody: identify",
      required: !may.identify,
      disabled: !may.verify,
    });
    this.again = el("button", { type: "submit", class: "quiet", text: "Ask again", hidden: true });
    this.preview = el("img", { class: "preview", alt: "the picture that was given", hidden: true });
    this.answer = el(
      "div",
      { id: "live-answer", class: "answer", role: "status", "aria-live": "polite" },
      el("p", {
        class: "note",
        text: "The answer appears here: verdict, score, threshold, and what that threshold stands for.",
      }),
    );
    this.zone = el(
      "div",
      { id: "drop", class: "drop" },
      this.preview,
      el(
        "p",
        null,
        el("b", { text: "Drop a picture here" }),
        el("br"),
        el("label", { for: "live-file", text: "or choose a file" }),
      ),
      this.file,
    );
    this.listen();
    /** @param {Event} event */
    const asked = (event) => {
      event.preventDefault();
      if (this.picture) this.send();
    };
    byId("live-body").replaceChildren(
      el(
        "div",
        { class: "live" },
        el(
          "form",
          { class: "card asked", onsubmit: asked },
          this.zone,
          el(
            "div",
            { class: "fields" },
            el("div", { class: "field" }, el("label", { for: "live-claim", text: "Claimed identity" }), this.claim),
          ),
          this.again,
        ),
        el("div", { class: "card" }, this.answer),
      ),
    );
  }

  listen() {
    /** @param {Event} event */
    const over = (event) => {
      event.preventDefault();
      this.zone.classList.add("over");
    };
    this.zone.addEventListener("dragenter", over);
    this.zone.addEventListener("dragover", over);
    this.zone.addEventListener("dragleave", () => this.zone.classList.remove("over"));
    this.zone.addEventListener("drop", (/** @type {DragEvent} */ event) => {
      event.preventDefault();
      this.zone.classList.remove("over");
      this.take(event.dataTransfer?.files[0]);
    });
    // A near miss must not leave the page.
    for (const name of ["dragover", "drop"]) window.addEventListener(name, (event) => event.preventDefault());
  }

  /** @param {File | undefined} file */
  take(file) {
    if (!file) return;
    this.picture = file;
    if (this.preview.src) URL.revokeObjectURL(this.preview.src);
    this.preview.src = URL.createObjectURL(file);
    this.preview.hidden = false;
    this.again.hidden = false;
    this.send();
  }

  async send() {
    const claim = this.claim.value.trim();
    if (!claim && !this.may.identify) {
      const text = "Say who it claims to be, then ask again: this key may verify but not identify.";
      this.answer.replaceChildren(el("p", { class: "note", text }));
      return;
    }
    this.answer.replaceChildren(el("p", { class: "note", text: "Asking …" }));
    this.answer.setAttribute("aria-busy", "true");
    try {
      this.answer.replaceChildren(...(await this.ask(claim)));
    } catch (error) {
      const text = error instanceof Refused ? error.message : "The service cannot be reached.";
      this.answer.replaceChildren(el("p", { class: "verdict bad", text: "Not answered" }), el("p", { text }));
    }
    this.answer.removeAttribute("aria-busy");
  }

  // The same route that programs use; the cookie of this session says who asks.
  /** @param {string} claim */
  async ask(claim) {
    const body = new FormData();
    if (this.picture) body.append("image", this.picture);
    if (claim) body.append("identity", claim);
    const url = new URL(`../../v1/${claim ? "verify" : "identify"}`, import.meta.url);
    const found = await told(await fetch(url, { method: "POST", body }));
    if (claim && found.score === null && this.may.identify) throw new Refused("nobody of that name is enrolled");
    return claim ? this.verified(found) : this.identified(found);
  }

  /** @param {Identified} found */
  identified(found) {
    const list = el(
      "ol",
      { class: "candidates" },
      found.candidates.map((c) => this.candidate(c, found.threshold)),
    );
    const none = el("p", { class: "note", text: "Nobody is enrolled." });
    return [
      this.verdict(found.match !== null, found.match ?? refusal(found)),
      this.stands(found),
      found.candidates.length ? list : none,
    ];
  }

  /** @param {Verified} found */
  verified(found) {
    const one = { identity: found.identity, score: found.score, match: found.match };
    return [
      this.verdict(found.match, found.match ? found.identity : refusal(found)),
      this.stands(found),
      el("ol", { class: "candidates" }, this.candidate(one, found.threshold)),
    ];
  }

  /** @param {boolean} match @param {string} text */
  verdict(match, text) {
    return el(
      "p",
      { class: `verdict ${match ? "good" : "bad"}` },
      el("span", { text: match ? "Match" : "" }),
      " ",
      el("b", { text }),
    );
  }

  /** @param {Point} point */
  stands({ threshold, far, per, false_matches, false_accepts }) {
    if (threshold === null) {
      const text =
        "No threshold was measured for this gallery, so nobody is a match. Whoever runs the service can measure one " +
        "(mettle gallery calibrate) or set one (mettle serve --threshold).";
      return el("p", { class: "note", text });
    }
    const share = false_matches ?? false_accepts;
    const most = typeof share === "number" ? `: at most ${percent(share)} of strangers pass` : "";
    const stands =
      typeof far === "number"
        ? `stands for a false-accept rate of ${percent(far)}${per ? ` per ${per}` : ""}${most}`
        : "was given by hand; its false-accept rate is not known";
    return el("p", { class: "note", text: `The threshold of ${threshold.toFixed(3)} ${stands}.` });
  }

  // A candidate with a bar for the score and a line at the threshold; a picture where this run has one of that name.
  /** @param {Candidate} found @param {number | null} threshold */
  candidate({ identity, score, match }, threshold) {
    const view = this.view();
    const label = view?.facts.kind === "image" ? view.facts.labels.indexOf(identity) : -1;
    const sample = label >= 0 && view?.points ? view.points.label.indexOf(label) : -1;
    const bar = el(
      "span",
      { class: "bar", "aria-hidden": "true" },
      el("span", { class: "fill" }),
      el("span", { class: "limit" }),
    );
    const seen = score !== null && score !== undefined; // a key that may only verify does not learn how near a miss was
    bar.children[0].style.width = `${100 * Math.max(0, Math.min(1, seen ? score : 0))}%`;
    if (threshold === null) bar.children[1].remove();
    else bar.children[1].style.left = `${100 * Math.max(0, Math.min(1, threshold))}%`;
    return el(
      "li",
      { class: match ? "match" : "" },
      view && sample >= 0
        ? el("img", { class: "picture", src: picture(view, sample), alt: "", width: 40, height: 40 })
        : null,
      el("span", { class: "who", text: identity }),
      bar,
      el("b", { text: seen ? score.toFixed(3) : "hidden" }),
    );
  }
}
