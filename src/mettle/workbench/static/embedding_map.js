// The map: positions lie in [-1, 1], the view is a centre and a zoom; paint.js draws it.

import { Cells } from "./spatial_grid.js";
import { flat, paint } from "./scatter_renderer.js";

const REACH = 22; // pixels around the pointer
/** @type {Record<string, [number, number]>} */
const STEP = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

/**
 * What the page does when a point becomes the current one, is entered or left, and when the view moves.
 * @typedef {object} Heard
 * @property {(i: number, how: string) => void} point
 * @property {(i: number) => void} enter
 * @property {() => void} clear
 * @property {() => void} [moved]
 */

export class PointMap {
  /** @param {HTMLCanvasElement} canvas @param {Heard} heard */
  constructor(canvas, heard) {
    /** @type {Cells | null} */
    this.cells = null;
    this.canvas = canvas;
    this.context = flat(canvas);
    this.heard = heard;
    this.width = this.height = this.dragged = 0;
    this.dots = 1;
    this.waiting = false;
    /** @type {ArrayLike<number>} */
    this.x = new Float32Array();
    /** @type {ArrayLike<number>} */
    this.y = this.x;
    /** @type {ArrayLike<number>} */
    this.label = this.x;
    /** @type {ArrayLike<number>} */
    this.code = this.x;
    /** @type {string[]} */
    this.palette = [];
    this.passes = new Uint8Array();
    this.view = { x: 0, y: 0, zoom: 1 };
    this.current = -1;
    /** @type {Map<number, [number, number]>} */
    this.fingers = new Map();
    /** @type {Map<string, HTMLCanvasElement>} */
    this.sprites = new Map();
    new ResizeObserver(() => this.resized()).observe(canvas);
    this.listen();
  }

  // Positions and labels; the view stays where it is.
  /** @param {ArrayLike<number>} x @param {ArrayLike<number>} y @param {ArrayLike<number>} label */
  setPoints(x, y, label) {
    Object.assign(this, { x, y, label, cells: new Cells(x, y) });
    if (this.passes.length !== x.length) this.passes = new Uint8Array(x.length).fill(1);
    if (this.current >= x.length) this.current = -1;
    this.draw();
  }

  /** @param {string[]} palette @param {ArrayLike<number>} code */
  setColours(palette, code) {
    Object.assign(this, { palette, code });
    this.sprites.clear();
    this.draw();
  }

  /** @param {Uint8Array} passes */
  setPasses(passes) {
    this.passes = passes;
    if (this.current >= 0 && !passes[this.current]) this.point(-1);
    this.draw();
  }

  /** @param {number} i @param {boolean} tell @param {string} how */
  point(i, tell = true, how = "pointer") {
    if (i === this.current) return;
    this.current = i;
    this.draw();
    if (tell) this.heard.point(i, how);
  }

  fit() {
    this.view = { x: 0, y: 0, zoom: 1 };
    this.draw();
  }

  /** @param {number} factor @param {number} px @param {number} py */
  zoom(factor, px = this.width / 2, py = this.height / 2) {
    const [x, y] = this.place(px, py);
    const zoom = Math.max(0.5, Math.min(200, this.view.zoom * factor));
    this.view.zoom = zoom;
    const [nx, ny] = this.place(px, py);
    this.view.x += x - nx;
    this.view.y += y - ny;
    this.draw();
    this.heard.moved?.();
  }

  get scale() {
    return 0.47 * Math.min(this.width, this.height) * this.view.zoom;
  }

  // Where a point is on the canvas, and back.
  /** @param {number} i @returns {[number, number]} */
  pixel(i) {
    const s = this.scale;
    return [(this.x[i] - this.view.x) * s + this.width / 2, (this.y[i] - this.view.y) * s + this.height / 2];
  }

  /** @param {number} px @param {number} py @returns {[number, number]} */
  place(px, py) {
    return [(px - this.width / 2) / this.scale + this.view.x, (py - this.height / 2) / this.scale + this.view.y];
  }

  resized() {
    const box = this.canvas.getBoundingClientRect();
    this.width = box.width;
    this.height = box.height;
    this.dots = Math.min(2, window.devicePixelRatio || 1);
    this.canvas.width = Math.max(1, Math.round(box.width * this.dots));
    this.canvas.height = Math.max(1, Math.round(box.height * this.dots));
    this.sprites.clear();
    this.draw();
  }

  draw() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      paint(this);
    });
  }

  listen() {
    /** @param {string} name @param {(event: any) => void} action @param {AddEventListenerOptions} [options] */
    const on = (name, action, options) => this.canvas.addEventListener(name, action, options);
    on("pointerdown", (event) => this.pressed(event));
    on("pointermove", (event) => this.moved(event));
    for (const name of ["pointerup", "pointercancel"]) on(name, (event) => this.released(event));
    on("pointerleave", (event) => {
      if (event.pointerType === "mouse" && !this.fingers.size) this.point(-1);
    });
    on(
      "wheel",
      (event) => {
        if (document.activeElement !== this.canvas && !event.ctrlKey) return; // the page scrolls over a map not in use
        event.preventDefault();
        this.zoom(Math.exp(-event.deltaY * (event.ctrlKey ? 0.01 : 0.002)), event.offsetX, event.offsetY);
      },
      { passive: false },
    );
    on("keydown", (event) => this.typed(event));
    on("focus", () => {
      if (this.current < 0 && this.canvas.matches(":focus-visible")) this.point(this.middle(), true, "keyboard");
    });
    on("blur", () => this.point(-1));
  }

  /** @param {PointerEvent} event */
  pressed(event) {
    this.canvas.setPointerCapture?.(event.pointerId);
    this.fingers.set(event.pointerId, [event.offsetX, event.offsetY]);
    this.dragged = 0;
  }

  /** @param {PointerEvent} event */
  moved(event) {
    const before = this.fingers.get(event.pointerId);
    if (!before) {
      this.point(this.under(event.offsetX, event.offsetY));
      return;
    }
    const [dx, dy] = [event.offsetX - before[0], event.offsetY - before[1]];
    if (this.fingers.size === 2) {
      const other = [...this.fingers].find(([id]) => id !== event.pointerId)?.[1] ?? before;
      const was = Math.hypot(before[0] - other[0], before[1] - other[1]);
      const is = Math.hypot(event.offsetX - other[0], event.offsetY - other[1]);
      if (was > 0) this.zoom(is / was, other[0], other[1]);
    } else {
      this.dragged += Math.abs(dx) + Math.abs(dy);
      this.view.x -= dx / this.scale;
      this.view.y -= dy / this.scale;
      this.draw();
      this.heard.moved?.();
    }
    this.fingers.set(event.pointerId, [event.offsetX, event.offsetY]);
  }

  /** @param {PointerEvent} event */
  released(event) {
    const tap = this.fingers.has(event.pointerId) && this.dragged < 6 && event.type === "pointerup";
    this.fingers.delete(event.pointerId);
    if (tap) this.point(this.under(event.offsetX, event.offsetY));
  }

  /** @param {number} px @param {number} py */
  under(px, py) {
    if (!this.cells) return -1;
    const [x, y] = this.place(px, py);
    return this.cells.nearest(x, y, REACH / Math.max(this.scale, 1e-9), this.passes);
  }

  /** @param {KeyboardEvent} event */
  typed(event) {
    const step = STEP[event.key];
    if (step && event.shiftKey) {
      this.view.x += (step[0] * 60) / this.scale;
      this.view.y += (step[1] * 60) / this.scale;
      this.draw();
      this.heard.moved?.();
    } else if (step) this.walk(step);
    else if (event.key === "+" || event.key === "=") this.zoom(1.4, ...this.focusPoint());
    else if (event.key === "-") this.zoom(1 / 1.4, ...this.focusPoint());
    else if (event.key === "0") {
      this.fit();
      this.heard.moved?.();
    } else if (event.key === "Enter" && this.current >= 0) this.heard.enter(this.current);
    else if (event.key === "Escape") this.heard.clear();
    else return;
    event.preventDefault();
  }

  /** @returns {[number, number]} */
  focusPoint() {
    return this.current >= 0 ? this.pixel(this.current) : [this.width / 2, this.height / 2];
  }

  // The passing point nearest to the middle of the view.
  middle() {
    let best = -1;
    let least = Infinity;
    for (let i = 0; i < this.x.length; i += 1) {
      const d = (this.x[i] - this.view.x) ** 2 + (this.y[i] - this.view.y) ** 2;
      if (this.passes[i] && d < least) {
        least = d;
        best = i;
      }
    }
    return best;
  }

  // On to the nearest point in a direction: straight ahead counts for more than sideways.
  /** @param {[number, number]} direction */
  walk([dx, dy]) {
    if (this.current < 0) {
      this.point(this.middle(), true, "keyboard");
      return;
    }
    const { x, y, current, passes } = this;
    const closest = 0.5 / this.scale; // half a pixel
    let best = -1;
    let least = Infinity;
    for (let i = 0; i < x.length; i += 1) {
      if (!passes[i] || i === current) continue;
      const ahead = (x[i] - x[current]) * dx + (y[i] - y[current]) * dy;
      const aside = Math.abs((x[i] - x[current]) * dy) + Math.abs((y[i] - y[current]) * dx);
      if (ahead <= closest || aside > 2 * ahead) continue;
      const cost = ahead + 2 * aside;
      if (cost < least) {
        least = cost;
        best = i;
      }
    }
    if (best < 0) return;
    const [qx, qy] = this.pixel(best);
    if (qx < 20 || qy < 20 || qx > this.width - 20 || qy > this.height - 20) {
      [this.view.x, this.view.y] = [this.x[best], this.y[best]];
    }
    this.point(best, true, "keyboard");
  }
}
