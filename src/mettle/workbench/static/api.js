// Questions to the service: JSON for facts, one packed body for arrays.

const BASE = new URL("../api/", import.meta.url);
const TYPES = { f4: Float32Array, f8: Float64Array, u4: Uint32Array };

/**
 * What is known of a run: facts of the service and, where a list or a map asks for them, arrays over its test samples.
 * @typedef {object} RunFacts
 * @property {string} key changes with the run
 * @property {string} name
 * @property {string} title
 * @property {string} data two runs with the same were tested on the same samples
 * @property {string} kind "image" or "row"
 * @property {number} samples
 * @property {number} dimension
 * @property {string[]} labels
 * @property {{name: string, names: string[]}[]} columns
 * @property {string[]} quartiles of difficulty
 * @property {string[]} warnings
 * @property {{title: string}} scenario
 * @property {{name: string, text: string, interval: string, meaning: string, has_interval: boolean}[]} numbers
 *
 * @typedef {Record<string, any>} PointArrays `x`, `y`, `label`, `difficulty`, `quartile`, `column.0`, ... by sample
 * @typedef {{name: string, points: [number, number][]}} Curve
 * @typedef {{title: string, caption: string, share: boolean, lines: Curve[]}} Panel
 * @typedef {{index: number, facts: RunFacts, points: PointArrays, panels: Panel[], how: string, final: boolean,
 *   waits?: boolean, counts?: any}} View
 */

export class Refused extends Error {}

/** The reason of an error that the service gave; any other error is thrown on. @param {unknown} error */
export function reason(error) {
  if (!(error instanceof Refused)) throw error;
  return error.message;
}

/** @typedef {Iterable<[string, any]> | null} Query pairs of a name and a value */

/** @param {string} path @param {Query} [query] */
export function address(path, query) {
  const url = new URL(path, BASE);
  for (const [key, value] of query || []) url.searchParams.append(key, value);
  return url;
}

/** @param {string} path @param {Query} [query] */
export async function ask(path, query) {
  return told(await fetch(address(path, query)));
}

/** The JSON of an answer, or its reason as an error. @param {Response} response */
export async function told(response) {
  if (response.ok) return response.json();
  let text = `the service answered ${response.status}`;
  try {
    const body = await response.json();
    const said = body.error ?? body.message ?? body.detail;
    text = typeof said === "string" ? said : (said?.message ?? text);
  } catch {
    /* no JSON: the status must do */
  }
  throw new Refused(text);
}

// uint32 length of the header, the header as JSON, then each array from a multiple of eight bytes.
/** @param {string} path @param {Query} [query] */
export async function arrays(path, query) {
  const response = await fetch(address(path, query));
  if (!response.ok) return told(response);
  const body = await response.arrayBuffer();
  const size = new DataView(body).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(body, 4, size)));
  /** @type {Record<string, Float32Array | Float64Array | Uint32Array>} */
  const found = {};
  for (const { name, type, length, offset } of header.arrays) {
    const kind = TYPES[/** @type {keyof typeof TYPES} */ (type)];
    found[name] = new kind(body, 4 + size + offset, length);
  }
  return { ...header, arrays: found };
}

/** @param {View} view @param {number} sample */
export const picture = (view, sample) =>
  address(`runs/${view.index}/picture/${sample}`, [["v", view.facts.key]]).href;
