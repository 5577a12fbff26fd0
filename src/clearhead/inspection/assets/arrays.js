// The embedded arrays, and the matrices of a head, which inspection/rounded_matrices.py rounded to levels of 8 bits.

const ARRAY_TYPES = { float32: Float32Array, int32: Int32Array, uint16: Uint16Array, uint8: Uint8Array };
const MAX_LEVEL = 254;
const NOT_FINITE = 255;
const MAX_MAXIMUM = 65535;
let buffer = null;
let decoded = { key: "" };

/** Decode the block of all arrays from base64 and decompress it. */
async function loadArrays() {
  const text = atob(byId("arrays").textContent);
  const compressed = new Uint8Array(text.length);
  for (let index = 0; index < text.length; index++) compressed[index] = text.charCodeAt(index);
  const stream = new Blob([compressed]).stream().pipeThrough(new DecompressionStream("deflate"));
  buffer = await new Response(stream).arrayBuffer();
}

function arrayOf(reference) {
  const length = reference.shape.reduce((product, size) => product * size, 1);
  return new ARRAY_TYPES[reference.type](buffer, reference.offset, length);
}

/** Call `visit(cell, root)` for each allowed cell of a head, where the weight is the square of `root`. */
function visitWeights(view, layer, head, visit) {
  const [numRows, numColumns] = [view.rows.length, view.columns.length];
  const place = layer.full.indexOf(head);
  const allowed = layer.allowed && arrayOf(layer.allowed);
  const levels = arrayOf(layer.weights);
  const maxima = arrayOf(layer.maxima);
  let next = place * layer.weights.shape[1];
  for (let row = 0; row < numRows; row++) {
    const scale = Math.sqrt(maxima[place * numRows + row] / MAX_MAXIMUM) / MAX_LEVEL;
    for (let cell = row * numColumns; cell < (row + 1) * numColumns; cell++) {
      if (allowed && !allowed[cell]) continue;
      const level = levels[next++];
      visit(cell, level === NOT_FINITE ? NaN : level * scale);
    }
  }
}

function decodeScores(layer, head, size) {
  const place = layer.full.indexOf(head);
  const levels = arrayOf(layer.scores).subarray(place * size, (place + 1) * size);
  const [low, high] = arrayOf(layer.ranges).subarray(2 * place, 2 * place + 2);
  const step = (high - low) / MAX_LEVEL;
  return { step, scores: Float32Array.from(levels, (level) => (level === NOT_FINITE ? NaN : low + step * level)) };
}

/** The matrices of the selected head, or null if the page has only its thumbnail. */
function currentMatrices() {
  const [view, layer] = [currentView(), currentLayer()];
  if (!layer.full.includes(state.head)) return null;
  const key = `${state.view}/${state.layer}/${state.head}`;
  if (decoded.key !== key) {
    const weights = new Float32Array(view.rows.length * view.columns.length);
    visitWeights(view, layer, state.head, (cell, root) => (weights[cell] = root * root));
    const rest = layer.scores ? decodeScores(layer, state.head, weights.length) : { scores: null, step: 0 };
    const allowed = layer.allowed && arrayOf(layer.allowed);
    decoded = { key, weights, allowed, isMasked: (cell) => Boolean(allowed) && !allowed[cell], ...rest };
  }
  return decoded;
}
