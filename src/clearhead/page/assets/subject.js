// The text under inspection: typed text, an answer of the chat, or a bundled example. All views ask it for data.

import { describeModel, inspect, ServerError } from "./api.js";
import { packIds, state, unpackIds } from "./state.js";

const MAX_ANSWERS = 400;
export const EXAMPLES = {
  induction: "It copies a pattern",
  names: "It keeps names apart",
  capitals: "It recalls a fact",
};
export const DEFAULT_TEXT = "The keys to the cabinet near the doors are on the table";

/** A text with its tokens; `ask` gives the answers to questions about it, and remembers them. */
class Subject {
  constructor(key, tokens, source, example = null) {
    Object.assign(this, { key, tokens, source, example, answers: new Map() });
  }

  get body() {
    return this.source.length ? { tokens: this.tokens, source: this.source } : { tokens: this.tokens };
  }

  ask(question, fields = {}, signal = undefined) {
    const name = `${question} ${JSON.stringify(fields)}`;
    if (this.answers.has(name)) return this.answers.get(name);
    const answer = this.example ? this.recall(name) : inspect(question, { ...this.body, ...fields }, signal);
    answer.catch(() => this.answers.delete(name));
    if (this.answers.size >= MAX_ANSWERS) this.answers.delete(this.answers.keys().next().value);
    this.answers.set(name, answer);
    return answer;
  }

  /** The stored answer of a bundled example; what it does not hold, a server with the same model computes. */
  async recall(name) {
    if (name in this.example.answers) return this.example.answers[name];
    const [question] = name.split(" ");
    const served = await describeModel();
    if (served.error || !sameModel(served, this.example.model))
      throw new ServerError(`This bundled example does not contain that; it needs the model ${this.example.model.name}.`, 0);
    return inspect(question, { ...this.body, ...JSON.parse(name.slice(question.length + 1)) });
  }

  /** Tokens, kinds of attention and next tokens. */
  get info() {
    return this.ask("trace");
  }

  /** The probability of every token given those before it; null where there is none. */
  get probabilities() {
    return this.ask("probabilities").then((answer) => answer.probabilities);
  }
}

const sameModel = (one, other) => one.num_layers === other.num_layers && one.vocab_size === other.vocab_size && one.width === other.width;

let current = null;

/** The text that the address names: loaded or encoded once, and kept while the address names the same. */
export async function currentSubject() {
  const { params } = state;
  const [example, ids, text] = ["example", "ids", "text"].map((key) => params.get(key));
  const key = JSON.stringify([example, ids, params.get("from"), text, params.get("source")]);
  if (current?.key === key) return current.promise;
  const promise = example in EXAMPLES ? loadExample(key, example) : open(key, ids, text, params);
  current = { key, promise };
  promise.catch(() => (current = null));
  return promise;
}

async function loadExample(key, name) {
  const response = await fetch(`/assets/example-${name}.json`);
  if (!response.ok) throw new ServerError("This example could not be loaded.", response.status);
  const example = await response.json();
  return new Subject(key, example.tokens, [], example);
}

async function open(key, ids, text, params) {
  if (ids) return new Subject(key, unpackIds(ids), unpackIds(params.get("from")));
  const model = await describeModel();
  if (model.error) throw new ServerError(model.error, 0);
  const source = model.kind === "encoder-decoder" ? { source: params.get("source") || text || DEFAULT_TEXT } : {};
  const encoded = await inspect("encode", { text: text || DEFAULT_TEXT, ...source });
  return new Subject(key, encoded.tokens.map((one) => one.id), encoded.source.map((one) => one.id));
}

/** The parameters of an address that names tokens, such as those of an answer. */
export function subjectParams(tokens, source = [], more = {}) {
  return { ids: packIds(tokens), ...(source.length ? { from: packIds(source) } : {}), ...more };
}
