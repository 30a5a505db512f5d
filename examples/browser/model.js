/**
 * A network: one model that reads digits, and one whose run is a step of learning. Weights are inputs of both.
 *
 * @typedef {import("./safetensors.js").Saved} Saved
 * @typedef {import("./digits.js").Batch} Batch
 */

import { SIZE } from "./drawing.js";

const MODULES = { wasm: "ort.wasm.bundle.min.mjs", webgpu: "ort.webgpu.bundle.min.mjs" };

export class Network {
  #ort;
  #reader;
  #learner;
  #layer;
  #weights; // tensors by their names
  #memory; // of the optimizer, likewise
  #last = Promise.resolve(); // the run before: onnxruntime takes one at a time

  /**
   * @param {"wasm" | "webgpu"} provider
   * @param {Saved} saved  its first weights
   * @param {URL | string} folder  that of read.onnx and learn.onnx, and of onnxruntime
   * @returns {Promise<Network>}
   */
  static async open(provider, saved, folder = new URL(".", import.meta.url)) {
    const network = new Network();
    const at = (path) => new URL(path, folder).href;
    const ort = await import(at(`onnxruntime/${MODULES[provider]}`));
    // Threads share memory, which browsers allow with headers (COOP and COEP) that a plain static server does not send.
    ort.env.wasm.numThreads = 1;
    const options = { executionProviders: [provider], logSeverityLevel: 3 }; // not that shapes' nodes stay on the CPU
    network.#reader = await ort.InferenceSession.create(at("read.onnx"), options);
    if (provider === "webgpu") {
      const kept = Object.keys(saved.weights).flatMap((name) => [`new_${name}`, `new_m.${name}`, `new_v.${name}`]);
      options.preferredOutputLocation = Object.fromEntries(kept.map((name) => [name, "gpu-buffer"]));
    }
    network.#learner = await ort.InferenceSession.create(at("learn.onnx"), options);
    network.#ort = ort;
    network.set(saved);
    return network;
  }

  /**
   * Give it other weights. What the optimizer keeps begins anew.
   *
   * @param {Saved} saved
   */
  set({ layer, weights }) {
    const { Tensor } = this.#ort;
    this.#layer = layer;
    this.#weights = {};
    this.#memory = { step: new Tensor("int64", [0n], []) };
    for (const [name, { shape, data }] of Object.entries(weights)) {
      this.#weights[name] = new Tensor("float32", data.slice(), shape);
      for (const slot of "mv") this.#memory[`${slot}.${name}`] = new Tensor("float32", new Float32Array(data.length), shape);
    }
  }

  /**
   * Its weights, as they are now.
   *
   * @returns {Promise<Saved>}
   */
  get() {
    return this.#inTurn(async () => {
      const weights = {};
      for (const [name, tensor] of Object.entries(this.#weights)) {
        weights[name] = { shape: [...tensor.dims], data: await tensor.getData() };
      }
      return { layer: this.#layer, weights };
    });
  }

  /**
   * What it believes after each row: the probability of each class, by row, by digit and by class.
   *
   * @param {Float32Array} x  as of a `Batch`
   * @returns {Promise<Float32Array>}
   */
  read(x) {
    return this.#inTurn(async () => (await this.#reader.run({ x: this.#sequences(x), ...this.#weights })).y.data);
  }

  /**
   * Learn from digits, with a step of the optimizer.
   *
   * @param {Batch} batch
   * @param {number} rate  of learning
   * @returns {Promise<number>} the loss, of the weights before
   */
  learn({ x, labels }, rate) {
    return this.#inTurn(async () => {
      const { Tensor } = this.#ort;
      const every = Array(SIZE).fill(labels).flat(); // a label after each row
      const { loss, y, ...found } = await this.#learner.run({
        x: this.#sequences(x),
        target: new Tensor("int64", BigInt64Array.from(every, BigInt), [SIZE, labels.length]),
        learning_rate: new Tensor("float32", [rate], []),
        ...this.#weights,
        ...this.#memory,
      });
      for (const kept of [this.#weights, this.#memory]) {
        for (const [name, old] of Object.entries(kept)) {
          old.dispose();
          kept[name] = found[`new_${name}`];
        }
      }
      return loss.data[0];
    });
  }

  close() {
    return this.#inTurn(() => Promise.all([this.#reader.release(), this.#learner.release()]));
  }

  #sequences(x) {
    return new this.#ort.Tensor("float32", x, [SIZE, x.length / SIZE ** 2, SIZE]);
  }

  #inTurn(run) {
    const result = this.#last.then(run);
    this.#last = result.catch(() => {});
    return result;
  }
}
