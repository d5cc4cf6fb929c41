// Points in square cells, so that the one under the pointer is found without looking at all of them.

export class Cells {
  /** Coordinates are from -1 to 1. @param {ArrayLike<number>} x @param {ArrayLike<number>} y */
  constructor(x, y) {
    this.x = x;
    this.y = y;
    this.side = Math.max(1, Math.min(256, Math.ceil(Math.sqrt(x.length) / 2)));
    const start = new Uint32Array(this.side * this.side + 1);
    const at = Uint32Array.from(x, (_, i) => this.cell(x[i]) + this.side * this.cell(y[i]));
    for (const c of at) start[c + 1] += 1;
    for (let c = 0; c < start.length - 1; c += 1) start[c + 1] += start[c];
    const next = start.slice();
    this.order = new Uint32Array(x.length);
    at.forEach((c, i) => {
      this.order[next[c]++] = i;
    });
    this.start = start;
  }

  /** @param {number} value */
  cell(value) {
    return Math.max(0, Math.min(this.side - 1, Math.floor(((value + 1) / 2) * this.side)));
  }

  // The nearest point within a distance that passes, or -1.
  /** @param {number} px @param {number} py @param {number} reach @param {ArrayLike<number>} passes */
  nearest(px, py, reach, passes) {
    let best = -1;
    let least = reach * reach;
    for (let cy = this.cell(py - reach); cy <= this.cell(py + reach); cy += 1) {
      for (let cx = this.cell(px - reach); cx <= this.cell(px + reach); cx += 1) {
        const c = cx + this.side * cy;
        for (let k = this.start[c]; k < this.start[c + 1]; k += 1) {
          const i = this.order[k];
          const d = (this.x[i] - px) ** 2 + (this.y[i] - py) ** 2;
          if (d < least && passes[i]) {
            least = d;
            best = i;
          }
        }
      }
    }
    return best;
  }
}
