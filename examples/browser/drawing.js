/**
 * A drawing as strokes of a pen, and the digit of 8 x 8 pixels that the network reads.
 *
 * @typedef {{ x: number, y: number }} Point  from 0 to 1, with y downwards
 * @typedef {Point[]} Stroke
 */

export const SIZE = 8; // rows and columns of a digit
const BLOCK = 4; // the data set counted black pixels in blocks of 4 x 4; so do we, 0 to 16 of them
const FINE = SIZE * BLOCK;
const PEN = 2.6; // its radius, in those pixels
const SMALLEST = 0.2; // a drawing is enlarged as if it were at least so large, so that a dot remains a dot

/**
 * The strokes as the data set has its digits: as large as fits, in the middle, and 0 to 1 for the ink of each pixel.
 *
 * @param {Stroke[]} strokes
 * @returns {Float32Array} row by row
 */
export function digitOf(strokes) {
  const digit = new Float32Array(SIZE * SIZE);
  const points = strokes.flat();
  if (!points.length) return digit;
  const [left, right] = range(points.map(({ x }) => x));
  const [top, bottom] = range(points.map(({ y }) => y));
  const scale = (FINE - 2 * PEN) / Math.max(right - left, bottom - top, SMALLEST);
  const placed = strokes.map((stroke) =>
    stroke.map(({ x, y }) => ({
      x: FINE / 2 + scale * (x - (left + right) / 2),
      y: FINE / 2 + scale * (y - (top + bottom) / 2),
    })),
  );
  for (let row = 0; row < FINE; row++) {
    for (let column = 0; column < FINE; column++) {
      const centre = { x: column + 0.5, y: row + 0.5 };
      if (placed.some((stroke) => distance(centre, stroke) <= PEN)) {
        digit[SIZE * Math.floor(row / BLOCK) + Math.floor(column / BLOCK)] += 1 / BLOCK ** 2;
      }
    }
  }
  return digit;
}

const range = (values) => [Math.min(...values), Math.max(...values)];

/** From a point to the nearest one of a stroke. */
function distance(point, stroke) {
  let nearest = Infinity;
  for (let k = 0; k < stroke.length; k++) {
    const from = stroke[Math.max(0, k - 1)];
    const [x, y] = [stroke[k].x - from.x, stroke[k].y - from.y];
    const along = ((point.x - from.x) * x + (point.y - from.y) * y) / (x * x + y * y || 1);
    const part = Math.min(1, Math.max(0, along));
    nearest = Math.min(nearest, Math.hypot(point.x - from.x - part * x, point.y - from.y - part * y));
  }
  return nearest;
}
