/**
 * Digits as batches for the network: x has the pixels by row, by digit and by column, as the models take sequences.
 *
 * @typedef {{ x: Float32Array, labels: number[] }} Batch
 */

import { SIZE } from "./drawing.js";

export const CLASSES = 10;

/**
 * The digits that ship with the page. Each pixel is one of 0 to 9 and a to g, for 0 to 16.
 *
 * @param {{ pixels: string, labels: string }} text
 * @returns {{ pixels: Float32Array, label: number }[]}
 */
export function parse({ pixels, labels }) {
  return Array.from(labels, (label, k) => ({
    pixels: Float32Array.from(pixels.slice(k * SIZE * SIZE, (k + 1) * SIZE * SIZE), (each) => parseInt(each, 17) / 16),
    label: Number(label),
  }));
}

/**
 * @param {{ pixels: Float32Array, label: number }[]} digits
 * @returns {Batch}
 */
export function batch(digits) {
  const x = new Float32Array(digits.length * SIZE * SIZE);
  digits.forEach(({ pixels }, k) => {
    for (let row = 0; row < SIZE; row++) {
      x.set(pixels.subarray(row * SIZE, (row + 1) * SIZE), (row * digits.length + k) * SIZE);
    }
  });
  return { x, labels: digits.map(({ label }) => label) };
}

/** The largest of each digit's beliefs after its last row. */
export function guesses(beliefs) {
  const last = beliefs.length - beliefs.length / SIZE;
  const found = [];
  for (let k = last; k < beliefs.length; k += CLASSES) {
    const belief = beliefs.subarray(k, k + CLASSES);
    found.push(belief.indexOf(Math.max(...belief)));
  }
  return found;
}
