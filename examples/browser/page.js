/** The page: connects the drawing, the network, the plots and the buttons. */

import { batch, guesses, parse, CLASSES } from "./digits.js";
import { digitOf } from "./drawing.js";
import { Network } from "./model.js";
import { Pad } from "./pad.js";
import { BeliefPlot, Curve, percent } from "./plots.js";
import { checkSame, read, write } from "./safetensors.js";

// For a drawing that was named: steps, and in each drawings, the newest always, and other digits, lest it forgets them.
const LESSON = { steps: 10, drawings: 8, others: 24, rate: 0.005 };
const PRACTICE = { steps: 100, digits: 32, rate: 0.01, look: 10 }; // every so many steps at how many are right
const READABLE = 10_000; // milliseconds that a message stays

const part = (id) => document.getElementById(id);
const fetched = async (name) => {
  const response = await fetch(name);
  if (!response.ok) throw new Error(`${name}: ${response.status} ${response.statusText}`);
  return response;
};
let fading;
function say(text) {
  part("status").textContent = text;
  part("status").classList.remove("old");
  clearTimeout(fading);
  fading = setTimeout(() => part("status").classList.add("old"), READABLE);
}
const saved = async (name) => read(await (await fetched(name)).arrayBuffer());

const belief = new BeliefPlot(part("belief"));
const loss = new Curve(part("loss"), "Loss, cross-entropy", [0, 1]);
const accuracy = new Curve(part("accuracy"), "Right of the digits held out", [96, 100], " %");
const pad = new Pad(part("pad"), look);

/** @type {Network} */
let network;
let computedBy = "wasm";
let practice, heldOut; // the digits that ship with the page
let [practised, steps] = [0, 0];
const drawings = []; // that were named
let busy = true; // learning, loading or saving

// ------------------------------------------------------------------------------------------------------------- reading
let [reading, again] = [false, null];

/** Show what is drawn and what the network believes; of several changes while it reads, the last counts. */
async function look(lifted = true) {
  if (!network) return;
  again = { lifted: lifted || again?.lifted };
  if (reading) return;
  reading = true;
  try {
    while (again) {
      const { lifted } = again;
      again = null;
      const pixels = digitOf(pad.strokes);
      const beliefs = pad.strokes.length ? await network.read(pixels) : null;
      if (again) continue;
      belief.show(pixels, beliefs, lifted);
      tell(beliefs);
    }
  } catch (error) {
    say(error.message);
  } finally {
    reading = false;
  }
}

function tell(beliefs) {
  const last = beliefs?.subarray(-CLASSES);
  const most = last ? Math.max(...last) : 0;
  part("verdict").innerHTML = last
    ? `<span>It reads</span> <strong>${last.indexOf(most)}</strong> <span>and is ${percent(most)} sure</span>`
    : "Nothing yet: draw something.";
}

// ------------------------------------------------------------------------------------------------------------ learning
/** The next few of the digits to practise on. */
function next(count) {
  return Array.from({ length: count }, () => practice[practised++ % practice.length]);
}

async function learn(digits, rate) {
  const value = await network.learn(batch(digits), rate);
  part("steps").textContent = ++steps;
  loss.add(steps, value);
  await new Promise(requestAnimationFrame); // the page is drawn, and answers
}

async function right() {
  const { x, labels } = batch(heldOut);
  const found = guesses(await network.read(x));
  return found.filter((guess, k) => guess === labels[k]).length / labels.length;
}

/** Look how many are right now. */
async function examine() {
  const now = await right();
  accuracy.add(steps, 100 * now);
  part("now").textContent = percent(now, 1);
  return now;
}

/** Begin anew with the weights that there are. */
async function begin() {
  steps = 0;
  loss.clear();
  accuracy.clear();
  part("steps").textContent = steps;
  part("before").textContent = percent(await examine(), 1);
  await look();
}

async function teach(label) {
  if (!pad.strokes.length) return say("Draw a digit first.");
  const pixels = digitOf(pad.strokes);
  const sure = async () => percent((await network.read(pixels)).at(label - CLASSES));
  const before = await sure();
  drawings.unshift({ pixels, label });
  part("drawings").textContent = drawings.length;
  part("names").children[label].classList.add("told");
  for (let step = 0; step < LESSON.steps; step++) {
    const place = (k) => k && (step * LESSON.drawings + k) % drawings.length;
    const some = Array.from({ length: LESSON.drawings }, (_, k) => drawings[place(k)]);
    await learn([...some, ...next(LESSON.others)], LESSON.rate);
  }
  await examine();
  pad.finished = true;
  await look();
  part("names").children[label].classList.remove("told");
  say(`Learned in ${LESSON.steps} steps. It was ${before} sure that this is a ${label}; now it is ${await sure()}. Draw another.`);
}

async function practise() {
  for (let step = 1; step <= PRACTICE.steps; step++) {
    await learn(next(PRACTICE.digits), PRACTICE.rate);
    if (step % PRACTICE.look === 0) {
      await examine();
      say(`Practising: step ${step} of ${PRACTICE.steps}`);
    }
  }
  await look();
  say(`Practised ${PRACTICE.steps} steps.`);
}

// ------------------------------------------------------------------------------------------------------- the weights
async function replace(weights, text) {
  network.set(weights);
  await begin();
  say(text);
}

async function save() {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([write(await network.get())]));
  link.download = "digits.safetensors";
  link.click();
  URL.revokeObjectURL(link.href);
  say(`Saved ${link.download}. In Python: blockcell.load("${link.download}")`);
}

async function load(file) {
  try {
    const found = read(await file.arrayBuffer());
    checkSame(found, await network.get());
    await replace(found, `Loaded ${file.name}.`);
  } catch (error) {
    throw new Error(`${file.name} cannot be loaded: ${error.message}.`);
  }
}

async function compute(provider) {
  say(`Loading ${provider === "wasm" ? "WebAssembly" : "WebGPU"}.`);
  const before = network;
  network = await Network.open(provider, await network.get());
  computedBy = provider;
  await before.close();
  await look();
  say("Ready.");
}

// -------------------------------------------------------------------------------------------------------------- events
/** Do something that takes a while, unless something does already; say what went wrong. */
async function during(work) {
  if (busy) return;
  busy = true;
  document.body.classList.add("busy");
  try {
    await work();
  } catch (error) {
    say(error.message);
  } finally {
    busy = false;
    document.body.classList.remove("busy");
  }
}

for (let label = 0; label < CLASSES; label++) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = label;
  button.setAttribute("aria-label", `It is a ${label}`);
  button.addEventListener("click", () => during(() => teach(label)));
  part("names").append(button);
}
part("pad").addEventListener("keydown", ({ key }) => {
  if (/^[0-9]$/.test(key)) during(() => teach(Number(key)));
});
part("undo").addEventListener("click", () => pad.undo());
part("clear").addEventListener("click", () => pad.clear());
part("practise").addEventListener("click", () => during(practise));
part("forget").addEventListener("click", () =>
  during(async () => replace(await saved("untrained.safetensors"), "It knows nothing now. Practise, or draw.")),
);
part("restore").addEventListener("click", () =>
  during(async () => replace(await saved("trained.safetensors"), "It is as it came.")),
);
part("save").addEventListener("click", () => during(save));
part("load").addEventListener("click", () => part("file").click());
part("file").addEventListener("change", ({ target }) => {
  const [file] = target.files;
  target.value = ""; // so that the same file may be chosen again
  if (file) during(() => load(file));
});
for (const radio of document.getElementsByName("provider")) {
  radio.addEventListener("change", async () => {
    await during(() => compute(radio.value));
    document.querySelector(`[value=${computedBy}]`).checked = true; // also where that failed
  });
}

// --------------------------------------------------------------------------------------------------------------- start
try {
  const digits = await (await fetched("digits.json")).json();
  [practice, heldOut] = [parse(digits.practice), parse(digits.held_out)];
  part("practice").textContent = `${practice.length} others`;
  part("held-out").textContent = `the ${heldOut.length}`;
  network = await Network.open("wasm", await saved("trained.safetensors"));
  await begin();
  say("Ready. Draw a digit.");
  busy = false;
} catch (error) {
  say(`It cannot start: ${error.message}`);
}
if (await navigator.gpu?.requestAdapter()) document.querySelector("[value=webgpu]").disabled = false;
else part("speed").textContent = "This browser has no WebGPU.";
