/**
 * Files of layers in the format .safetensors, as `layer.save` writes and `blockcell.load` reads them: the length of a
 * header, the header in JSON, and the arrays one after another. blockcell/files.py has the details.
 *
 * @typedef {{ shape: number[], data: Float32Array }} Weight
 * @typedef {{ layer: object, weights: Record<string, Weight> }} Saved  what the layer is, and its weights by their names
 */

const LENGTH = 8; // bytes that the header's length takes
const ITEM = Float32Array.BYTES_PER_ELEMENT; // numbers are little-endian, as they are in every browser

/**
 * @param {ArrayBuffer} buffer
 * @returns {Saved}
 */
export function read(buffer) {
  const length = buffer.byteLength < LENGTH ? Infinity : Number(new DataView(buffer).getBigUint64(0, true));
  const start = LENGTH + length;
  if (start > buffer.byteLength) throw new Error("it is no .safetensors file, or only a part of one");
  const { __metadata__: metadata, ...entries } = parsed(new TextDecoder().decode(new Uint8Array(buffer, LENGTH, length)));
  if (typeof metadata?.blockcell !== "string") throw new Error("it has no layer of blockcell");
  const { version, layer } = parsed(metadata.blockcell);
  if (version !== 1) throw new Error(`its format version is ${version}; expected 1, plain float32`);
  const weights = {};
  let expected = 0;
  for (const [name, { dtype, shape, data_offsets: [first, end] }] of Object.entries(entries)) {
    if (dtype !== "F32") throw new Error(`its ${name} has dtype ${dtype}; expected F32`);
    if (first !== expected || end - first !== ITEM * sizeOf(shape) || start + end > buffer.byteLength) {
      throw new Error(`its ${name} is damaged or cut off`);
    }
    weights[name] = { shape, data: new Float32Array(buffer.slice(start + first, start + end)) };
    expected = end;
  }
  return { layer, weights };
}

/**
 * @param {Saved} saved
 * @returns {ArrayBuffer}
 */
export function write({ layer, weights }) {
  // No checksum, which is of JSON as Python writes it; `blockcell.load` takes files without one.
  const header = { __metadata__: { blockcell: JSON.stringify({ version: 1, layer }) } };
  let end = 0;
  for (const [name, { shape }] of Object.entries(weights)) {
    const first = end;
    end += ITEM * sizeOf(shape);
    header[name] = { dtype: "F32", shape, data_offsets: [first, end] };
  }
  const plain = new TextEncoder().encode(JSON.stringify(header));
  const length = Math.ceil(plain.length / 8) * 8; // so that the arrays begin at a multiple of 8
  const buffer = new ArrayBuffer(LENGTH + length + end);
  new DataView(buffer).setBigUint64(0, BigInt(length), true);
  const text = new Uint8Array(buffer, LENGTH, length);
  text.fill(" ".charCodeAt(0));
  text.set(plain);
  for (const [name, { data }] of Object.entries(weights)) {
    new Float32Array(buffer, LENGTH + length + header[name].data_offsets[0], data.length).set(data);
  }
  return buffer;
}

/**
 * Throws unless both are the same kind of layer, with weights of the same shapes.
 *
 * @param {Saved} found
 * @param {Saved} expected
 */
export function checkSame(found, expected) {
  if (canonical(found.layer) !== canonical(expected.layer)) {
    throw new Error(`its layer is ${canonical(found.layer)}; expected ${canonical(expected.layer)}`);
  }
  for (const [name, { shape }] of Object.entries(expected.weights)) {
    const other = found.weights[name]?.shape;
    if (String(other) !== String(shape)) {
      throw new Error(`its ${name} ${other ? `is [${other.join(", ")}]` : "is missing"}; expected [${shape.join(", ")}]`);
    }
  }
}

const sizeOf = (shape) => shape.reduce((product, size) => product * size, 1);

/** JSON with the names of objects in order. */
const canonical = (value) =>
  JSON.stringify(value, (_, each) =>
    each && !Array.isArray(each) && typeof each === "object" ? Object.fromEntries(Object.entries(each).sort()) : each,
  );

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new Error("its header is damaged: it is no JSON");
  }
}
