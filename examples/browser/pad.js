/** The area to draw in: a pen that a pointer or keys move. */

import { element } from "./plots.js";

/** @typedef {import("./drawing.js").Stroke} Stroke */

const GRID = 16; // steps of the keys across the area
const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

export class Pad {
  /** @type {Stroke[]} */
  strokes = [];
  /** Whether the next stroke begins another drawing. */
  finished = false;
  #svg;
  #lines;
  #cursor;
  #place = { x: 0.5, y: 0.25 }; // of the cursor
  #down = false; // the pen that keys move
  #changed;

  /**
   * @param {SVGSVGElement} svg
   * @param {(lifted: boolean) => void} changed  is called whenever the drawing is another
   */
  constructor(svg, changed) {
    this.#svg = svg;
    this.#changed = changed;
    this.#lines = element(svg, "g");
    this.#cursor = element(svg, "circle", { r: 0.028 });
    this.#moveCursor(0, 0);
    let drawing = null; // the pointer that does, one at a time
    svg.addEventListener("pointerdown", (event) => {
      if (event.button || drawing !== null) return;
      drawing = event.pointerId;
      svg.setPointerCapture(drawing);
      this.#lift();
      this.#begin(this.#at(event));
    });
    svg.addEventListener("pointermove", (event) => {
      if (event.pointerId !== drawing) return;
      for (const each of event.getCoalescedEvents?.() ?? [event]) this.strokes.at(-1)?.push(this.#at(each));
      this.#draw(false);
    });
    for (const end of ["pointerup", "pointercancel"]) {
      svg.addEventListener(end, (event) => {
        if (event.pointerId !== drawing) return;
        drawing = null;
        this.#draw(true);
      });
    }
    svg.addEventListener("keydown", (event) => this.#key(event));
    svg.addEventListener("blur", () => this.#lift());
  }

  undo() {
    this.#lift();
    this.strokes.pop();
    this.#draw(true);
  }

  clear() {
    this.#lift();
    this.strokes = [];
    this.#draw(true);
  }

  #begin(point) {
    if (this.finished) this.strokes = [];
    this.finished = false;
    this.strokes.push([point]);
    this.#draw(false);
  }

  #lift() {
    const lifted = this.#down;
    this.#down = false;
    this.#moveCursor(0, 0);
    if (lifted) this.#draw(true);
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in MOVES) this.#moveCursor(...MOVES[event.key]);
    else if (event.key === "Backspace") this.undo();
    else if (event.key === "Escape") this.clear();
    else if (event.key !== " ") return;
    else if (this.#down) this.#lift();
    else {
      this.#down = true;
      this.#begin(this.#place);
      this.#moveCursor(0, 0);
    }
    event.preventDefault();
  }

  #moveCursor(right, down) {
    const inside = (value) => Math.min(1 - 1 / GRID, Math.max(1 / GRID, value));
    this.#place = { x: inside(this.#place.x + right / GRID), y: inside(this.#place.y + down / GRID) };
    this.#cursor.setAttribute("cx", this.#place.x);
    this.#cursor.setAttribute("cy", this.#place.y);
    this.#cursor.classList.toggle("down", this.#down);
    if (this.#down && (right || down)) {
      this.strokes.at(-1).push(this.#place);
      this.#draw(false);
    }
  }

  #at({ clientX, clientY }) {
    const { left, top, width, height } = this.#svg.getBoundingClientRect();
    return { x: (clientX - left) / width, y: (clientY - top) / height };
  }

  #draw(lifted) {
    this.#lines.replaceChildren();
    for (const stroke of this.strokes) {
      const points = [...stroke, stroke.at(-1)]; // a second point, or a dot is not drawn
      element(this.#lines, "polyline", { points: points.map(({ x, y }) => `${x},${y}`).join(" ") });
    }
    this.#changed(lifted);
  }
}
