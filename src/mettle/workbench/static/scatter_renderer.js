// Our own small renderer: discs for thousands of points, pixels for tens of thousands.

const MANY = 20000; // points from which on squares are drawn instead of discs

/** @typedef {import("./embedding_map.js").PointMap} PointMap */

/** The context of a canvas, which every browser has. @param {HTMLCanvasElement} canvas */
export function flat(canvas) {
  const context = canvas.getContext("2d");
  if (context === null) throw new Error("this browser draws no canvas");
  return context;
}

/** @param {PointMap} map */
function radius(map) {
  const base = Math.max(1.1, Math.min(3.4, 190 / Math.sqrt(map.x.length + 1)));
  return Math.min(7, base * map.view.zoom ** 0.35) * map.dots;
}

/** @param {PointMap} map */
export function paint(map) {
  const { context: c, x, dots } = map;
  if (!map.code.length || !map.width) return;
  const style = getComputedStyle(map.canvas);
  const faint = style.getPropertyValue("--faint").trim();
  const ink = style.getPropertyValue("--ink").trim();
  c.setTransform(1, 0, 0, 1, 0, 0);
  c.clearRect(0, 0, map.canvas.width, map.canvas.height);
  const s = map.scale * dots;
  const [ox, oy] = [map.canvas.width / 2 - map.view.x * s, map.canvas.height / 2 - map.view.y * s];
  const r = radius(map);
  if (x.length > MANY) squares(map, s, ox, oy, Math.max(1, Math.round(r)), faint);
  else discs(map, s, ox, oy, r, faint);
  if (map.current >= 0) emphasise(map, ink);
}

/**
 * @param {PointMap} map
 * @param {number} s pixels a unit
 * @param {number} ox where the origin lies
 * @param {number} oy
 * @param {number} r
 * @param {string} faint colour of what does not pass
 */
function discs(map, s, ox, oy, r, faint) {
  const { context: c, x, y } = map;
  const [right, bottom] = [map.canvas.width + r, map.canvas.height + r];
  const shapes = map.palette.map((colour) => sprite(map, colour, r));
  const none = sprite(map, faint, r);
  for (const passing of [0, 1]) {
    for (let i = 0; i < x.length; i += 1) {
      if (map.passes[i] !== passing) continue;
      const px = x[i] * s + ox;
      const py = y[i] * s + oy;
      if (px < -r || py < -r || px > right || py > bottom) continue;
      const shape = passing ? shapes[map.code[i]] : none;
      c.drawImage(shape, px - shape.width / 2, py - shape.height / 2);
    }
  }
}

// Straight into the pixels: tens of thousands of points take milliseconds.
/**
 * @param {PointMap} map
 * @param {number} s pixels a unit
 * @param {number} ox where the origin lies
 * @param {number} oy
 * @param {number} r
 * @param {string} faint colour of what does not pass
 */
function squares(map, s, ox, oy, r, faint) {
  const { context: c, x, y } = map;
  const { width, height } = map.canvas;
  const image = c.createImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  const colours = map.palette.map((colour) => packed(map, colour));
  const none = packed(map, faint);
  for (const passing of [0, 1]) {
    for (let i = 0; i < x.length; i += 1) {
      if (map.passes[i] !== passing) continue;
      const left = Math.round(x[i] * s + ox) - r;
      const top = Math.round(y[i] * s + oy) - r;
      if (left < 0 || top < 0 || left + 2 * r >= width || top + 2 * r >= height) continue;
      const colour = passing ? colours[map.code[i]] : none;
      for (let row = top; row <= top + 2 * r; row += 1)
        pixels.fill(colour, row * width + left, row * width + left + 2 * r + 1);
    }
  }
  c.putImageData(image, 0, 0);
}

// A colour as the bytes of a pixel; a context spells any colour as #rrggbb.
/** @param {PointMap} map @param {string} colour */
function packed(map, colour) {
  map.context.fillStyle = colour;
  const n = parseInt(String(map.context.fillStyle).slice(1), 16);
  return (0xff000000 | ((n & 0xff) << 16) | (n & 0xff00) | (n >> 16)) >>> 0;
}

// The current point ringed, its class mates outlined.
/** @param {PointMap} map @param {string} ink */
function emphasise(map, ink) {
  const { context: c, dots } = map;
  const own = map.label[map.current];
  const r = radius(map);
  c.strokeStyle = ink;
  c.lineWidth = 1.4 * dots;
  for (let i = 0; i < map.x.length; i += 1) {
    if (map.label[i] !== own || i === map.current) continue;
    const [px, py] = map.pixel(i);
    c.fillStyle = map.palette[map.code[i]];
    c.beginPath();
    c.arc(px * dots, py * dots, r + 1.6 * dots, 0, 7);
    c.fill();
    c.stroke();
  }
  const [px, py] = map.pixel(map.current);
  c.fillStyle = map.palette[map.code[map.current]];
  c.lineWidth = 2.6 * dots;
  c.beginPath();
  c.arc(px * dots, py * dots, r + 4.5 * dots, 0, 7);
  c.fill();
  c.stroke();
}

/** @param {PointMap} map @param {string} colour @param {number} r */
function sprite(map, colour, r) {
  const key = `${colour} ${r}`;
  let made = map.sprites.get(key);
  if (!made) {
    if (map.sprites.size > 200) map.sprites.clear();
    const size = Math.ceil(2 * r) + 2;
    made = Object.assign(document.createElement("canvas"), { width: size, height: size });
    const c = flat(made);
    c.fillStyle = colour;
    c.globalAlpha = 0.85;
    c.beginPath();
    c.arc(size / 2, size / 2, r, 0, 7);
    c.fill();
    map.sprites.set(key, made);
  }
  return made;
}
