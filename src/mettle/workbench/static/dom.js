// Elements, numbers as text, and small helpers. Text is only ever set as text: names cannot become markup.

const SVG = "http://www.w3.org/2000/svg";

/** @typedef {Record<string, any> | null | undefined} Props attributes, `text`, and listeners as `onclick` */

/**
 * @template {Element} T
 * @param {T} node
 * @param {Props} props
 * @param {any[]} children
 * @returns {T}
 */
function fill(node, props, children) {
  for (const [key, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "text") node.textContent = value;
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key in node && typeof value === "boolean") Reflect.set(node, key, value);
    else node.setAttribute(key, value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

/** @type {(tag: string, props?: Props, ...children: any[]) => any} */
export const el = (tag, props, ...children) => fill(document.createElement(tag), props, children);
/** @type {(tag: string, props?: Props, ...children: any[]) => any} */
export const svg = (tag, props, ...children) => fill(document.createElementNS(SVG, tag), props, children);
/** An element of the page, which has all that are asked for. @type {(id: string) => any} */
export const byId = (id) => document.getElementById(id);

/** @param {number} n */
export const whole = (n) => Math.round(n).toLocaleString("en");
const GAP = "\u00a0";

// A share with enough digits to tell small ones apart, but no more.
/** @param {number} share */
export function percent(share) {
  if (!Number.isFinite(share)) return "–";
  const value = 100 * share;
  const digits = value === 0 || value >= 10 ? 1 : Math.min(6, 1 - Math.floor(Math.log10(Math.abs(value))));
  return `${value.toFixed(value === 0 ? 0 : digits)}${GAP}%`;
}

// Two decimals with a real minus sign.
/** @param {number} value */
export const signed = (value) => value.toFixed(2).replace("-", "\u2212");

/** @param {number} n @param {string} one @param {string} many */
export const plural = (n, one, many) => `${whole(n)} ${n === 1 ? one : many}`;

// Calls only the last of a burst; `cancel` forgets a call that waits.
/**
 * @template {any[]} T
 * @param {number} ms
 * @param {(...given: T) => void} action
 */
export function later(ms, action) {
  let timer = 0;
  /** @param {T} given */
  const call = (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...given), ms);
  };
  call.cancel = () => clearTimeout(timer);
  return call;
}

// Answers that arrive after a newer question are dropped.
/** @returns {<T>(promise: Promise<T>) => Promise<T | undefined>} */
export function newest() {
  let turn = 0;
  return async (promise) => {
    const mine = ++turn;
    const value = await promise;
    return mine === turn ? value : undefined;
  };
}
