/** The plots, in SVG: what the network believes after each row, and curves of its learning. */

import { CLASSES } from "./digits.js";
import { SIZE } from "./drawing.js";

/** A new element of SVG, in a parent. */
export function element(parent, name, attributes = {}, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return parent.appendChild(made);
}

/** An empty picture in a part of the page, as wide as that is; `draw` is called again when the width changes. */
function picture(host, draw) {
  const svg = element(host, "svg", { role: "img" });
  let width = 0;
  new ResizeObserver(() => {
    if (!host.clientWidth || host.clientWidth === width) return;
    width = host.clientWidth;
    svg.replaceChildren();
    draw(svg, width);
  }).observe(host);
  return svg;
}

const PAUSE = 110; // milliseconds that a row takes to be read

/** The rows of the digit, and beside each of them a bar for every class. */
export class BeliefPlot {
  #svg;
  #rows = []; // the parts of each row
  #names = [];
  #shown = { pixels: new Float32Array(SIZE * SIZE), beliefs: null };
  #turn = 0; // counts, so that only the latest animation goes on

  constructor(host) {
    this.#svg = picture(host, (svg, width) => this.#lay(svg, width));
  }

  /**
   * @param {Float32Array} pixels  of a digit, row by row
   * @param {Float32Array | null} beliefs  after each row; null where there is nothing to read
   * @param {boolean} animated  row by row, or at once
   */
  async show(pixels, beliefs, animated) {
    const turn = ++this.#turn;
    this.#shown = { pixels, beliefs };
    this.#svg.setAttribute("aria-label", described(beliefs));
    if (beliefs && animated && !matchMedia("(prefers-reduced-motion: reduce)").matches) {
      for (let row = 0; row < SIZE; row++) {
        this.#paint(row);
        await new Promise((done) => setTimeout(done, PAUSE));
        if (turn !== this.#turn) return;
      }
    }
    this.#paint(SIZE);
  }

  /** With as many rows read, and the next one being read. */
  #paint(read) {
    const { pixels, beliefs } = this.#shown;
    this.#rows.forEach(({ group, cells, bars }, row) => {
      const belief = beliefs && row <= read ? beliefs.subarray(row * CLASSES, (row + 1) * CLASSES) : null;
      const most = belief ? Math.max(...belief) : NaN;
      group.classList.toggle("read", belief !== null);
      group.classList.toggle("reading", belief !== null && row === read);
      cells.forEach((cell, column) => cell.setAttribute("fill-opacity", pixels[row * SIZE + column]));
      bars.forEach((bar, k) => {
        bar.style.transform = `scaleY(${belief ? belief[k] : 0})`;
        bar.classList.toggle("most", belief?.[k] === most);
      });
    });
    const last = beliefs && read >= SIZE - 1 ? beliefs.subarray(-CLASSES) : null;
    this.#names.forEach((name, k) => name.classList.toggle("most", last !== null && last[k] === Math.max(...last)));
  }

  #lay(svg, width) {
    const side = Math.max(12, Math.min(40, (width - 40) / 17)); // of a pixel
    const tall = Math.max(side, 20); // as bars need it
    const [left, top, gap] = [22, 26, 18];
    const start = left + SIZE * side + gap; // of the bars
    const step = (width - start) / CLASSES;
    svg.setAttribute("height", top + SIZE * tall + 44);
    element(svg, "text", { x: left, y: 12, class: "axis-title" }, "What it sees");
    element(svg, "text", { x: start, y: 12, class: "axis-title" }, "What it believes");
    this.#rows = Array.from({ length: SIZE }, (_, row) => {
      const y = top + row * tall;
      const group = element(svg, "g", { class: "row" });
      element(group, "text", { x: left - 8, y: y + tall / 2 + 4, "text-anchor": "end", class: "number" }, row + 1);
      element(group, "rect", { x: left, y, width: SIZE * side, height: tall, class: "paper" });
      element(group, "rect", { x: start, y, width: CLASSES * step, height: tall - 2, class: "paper" });
      const cells = Array.from({ length: SIZE }, (_, column) =>
        element(group, "rect", { x: left + column * side, y, width: side, height: tall, class: "pixel" }),
      );
      const bars = Array.from({ length: CLASSES }, (_, k) =>
        element(group, "rect", { x: start + (k + 0.15) * step, y: y + 2, width: 0.7 * step, height: tall - 4, class: "bar" }),
      );
      return { group, cells, bars };
    });
    const bottom = top + SIZE * tall;
    this.#names = Array.from({ length: CLASSES }, (_, k) =>
      element(svg, "text", { x: start + (k + 0.5) * step, y: bottom + 18, "text-anchor": "middle", class: "name" }, k),
    );
    element(svg, "text", { x: left - 8, y: bottom + 18, "text-anchor": "end" }, "row");
    element(svg, "text", { x: width, y: bottom + 38, "text-anchor": "end" }, "digit; a full bar is 100 %");
    this.#paint(SIZE);
  }
}

function described(beliefs) {
  if (!beliefs) return "Belief after each row: nothing is drawn";
  const rows = Array.from({ length: SIZE }, (_, row) => {
    const belief = beliefs.subarray(row * CLASSES, (row + 1) * CLASSES);
    const most = Math.max(...belief);
    return `row ${row + 1}: ${belief.indexOf(most)}, ${percent(most)}`;
  });
  return `Most believed after each row: ${rows.join("; ")}`;
}

export const percent = (part, digits = 0) => `${(100 * part).toFixed(digits)} %`;

/** A curve over the steps of learning. */
export class Curve {
  #svg;
  #size;
  #points = [];
  #title;
  #unit;
  #range;

  /**
   * @param {HTMLElement} host
   * @param {string} title
   * @param {[number, number]} range  what the axis has in any case
   * @param {string} unit  what follows a value
   */
  constructor(host, title, range, unit = "") {
    this.#title = title;
    this.#range = range;
    this.#unit = unit;
    this.#svg = picture(host, (_, width) => {
      this.#size = { width, height: 200 };
      this.#draw();
    });
  }

  clear() {
    this.#points = [];
    this.#draw();
  }

  add(x, y) {
    this.#points.push({ x, y });
    this.#draw();
  }

  #draw() {
    const svg = this.#svg;
    const points = this.#points;
    const latest = points.at(-1);
    const reached = latest ? `: ${latest.y.toFixed(2)}${this.#unit} after ${latest.x} steps` : "";
    svg.setAttribute("aria-label", this.#title + reached);
    if (!this.#size) return;
    const { width, height } = this.#size;
    const [left, right, top, bottom] = [48, width - 12, 30, height - 40];
    const ys = points.map(({ y }) => y);
    const [low, high, step] = rounded(Math.min(...this.#range, ...ys), Math.max(...this.#range, ...ys));
    const most = Math.max(20, latest?.x ?? 0);
    const across = (x) => left + ((right - left) * x) / most;
    const up = (y) => bottom - ((bottom - top) * (y - low)) / (high - low);
    svg.replaceChildren();
    svg.setAttribute("height", height);
    element(svg, "text", { x: 0, y: 12, class: "axis-title" }, this.#title);
    const digits = Math.max(0, -Math.floor(Math.log10(step)));
    for (let y = low; y <= high + step / 2; y += step) {
      element(svg, "line", { x1: left, x2: right, y1: up(y), y2: up(y), class: "grid" });
      element(svg, "text", { x: left - 8, y: up(y) + 4, "text-anchor": "end" }, y.toFixed(digits) + this.#unit);
    }
    for (const x of [0, most / 2, most]) {
      element(svg, "text", { x: across(x), y: bottom + 18, "text-anchor": "middle" }, Math.round(x));
    }
    element(svg, "text", { x: (left + right) / 2, y: bottom + 36, "text-anchor": "middle" }, "steps of learning");
    const place = ({ x, y }) => `${across(x).toFixed(1)},${up(y).toFixed(1)}`;
    element(svg, "polyline", { points: points.map(place).join(" "), class: "curve" });
    if (latest) element(svg, "circle", { cx: across(latest.x), cy: up(latest.y), r: 4, class: "end" });
  }
}

/** Round limits of an axis around these values, and the distance of its marks. */
function rounded(low, high) {
  const rough = (high - low) / 4;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = unit * [1, 2, 5, 10].find((factor) => factor * unit >= rough);
  return [step * Math.floor(low / step), step * Math.ceil(high / step), step];
}
