// Streamed texts: from the chunks of the server to tokens with probabilities and alternatives.

import { describeModel, events, inspect } from "./api.js";

const NUM_ALTERNATIVES = 8;

const toHex = (bytes) => [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join(" ");
export const fromHex = (hex) => new Uint8Array(hex ? hex.split(" ").map((pair) => parseInt(pair, 16)) : []);

/** The bytes of a token as the completions API writes it: its text, or bytes:\xe4\xbd where it is no whole text. */
function bytesOf(text) {
  if (!/^bytes:(\\x[0-9a-f]{2})+$/i.test(text)) return new TextEncoder().encode(text);
  return new Uint8Array([...text.matchAll(/\\x([0-9a-f]{2})/gi)].map((match) => parseInt(match[1], 16)));
}

/** Yield the tokens of a chunk: {text, hex, logprob, alternatives}. */
function* tokensOf(choice) {
  if (choice.logprobs?.content)
    for (const one of choice.logprobs.content)
      yield token(one, (one.top_logprobs ?? []).map((other) => token(other)));
  else if (choice.logprobs?.tokens) {
    const { tokens, token_logprobs: logprobs, top_logprobs: top } = choice.logprobs;
    for (const [place, text] of tokens.entries()) {
      const others = Object.entries(top?.[place] ?? {}).map(([other, logprob]) => token({ token: other, logprob }));
      yield token({ token: text, logprob: logprobs[place] }, others.sort((one, other) => other.logprob - one.logprob));
    }
  } else {
    const text = choice.delta?.content ?? choice.text;
    if (text) yield token({ token: text, logprob: null });
  }
}

function token({ token: text, bytes, logprob }, alternatives = []) {
  return { hex: toHex(bytes ?? bytesOf(text)), name: text, logprob, alternatives };
}

/** The request of an answer to messages, or of a continuation of `prompt` (a text or token ids). */
function requestOf({ messages, prompt }, settings) {
  const options = { temperature: settings.temperature, top_p: settings.topP, max_tokens: settings.maxTokens };
  if (settings.seed !== null) options.seed = settings.seed;
  options.stream_options = { include_usage: true };
  if (prompt !== undefined) return ["/v1/completions", { prompt, logprobs: NUM_ALTERNATIVES, ...options }];
  return ["/v1/chat/completions", { messages, logprobs: true, top_logprobs: NUM_ALTERNATIVES, ...options }];
}

/** Generate into `answer`, calling `onToken` after each token. Aborting the signal closes the connection, which ends it. */
export async function generate(asked, settings, answer, signal, onToken) {
  const [path, body] = requestOf(asked, settings);
  const { name } = await describeModel();
  const started = performance.now();
  let last = started;
  let count = 0;
  let text = ""; // what the server counts as the text; a token that only ends it is not part of it
  const first = answer.tokens.length;
  try {
    for await (const event of events(path, { model: name, ...body }, signal)) {
      if (event.usage) answer.stats.promptTokens = event.usage.prompt_tokens;
      if (event.usage?.prompt_tokens_details) answer.stats.cachedTokens = event.usage.prompt_tokens_details.cached_tokens;
      const choice = event.choices?.[0];
      if (!choice) continue;
      text += choice.delta?.content ?? choice.text ?? "";
      for (const one of tokensOf(choice)) {
        last = performance.now();
        count += 1;
        answer.stats.firstSeconds ??= (last - started) / 1000;
        answer.tokens.push(one);
        const later = (last - started) / 1000 - answer.stats.firstSeconds;
        answer.stats.rate = count > 1 && later > 0 ? (count - 1) / later : null;
        onToken(one);
      }
      if (choice.finish_reason) answer.finish = choice.finish_reason;
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    answer.finish = "stopped";
  }
  answer.finish ??= "stopped";
  if (answer.finish === "stop") markSilent(answer.tokens.slice(first), text);
}

/** Mark the tokens at the end that are not part of the text, such as the one that ends a turn. */
function markSilent(tokens, text) {
  let length = 0;
  pieces(tokens).forEach((piece, place) => {
    if (length >= text.length && piece) tokens[place].silent = true;
    length += piece.length;
  });
}

/** The texts of tokens in a row: a character that is split over tokens belongs to the last of them. */
export function pieces(tokens) {
  const decoder = new TextDecoder();
  return tokens.map((one) => decoder.decode(fromHex(one.hex), { stream: true }));
}

export const textOf = (tokens) => new TextDecoder().decode(fromHex(tokens.filter((one) => one.hex && !one.silent).map((one) => one.hex).join(" ")));

/** The ids of the prompt of an answer, as the template made it: {prompt, ids, source}. */
export async function promptOf(asked) {
  const model = await describeModel();
  if (asked.messages) {
    const { prompt, tokens } = await inspect("encode", { messages: asked.messages });
    return { text: prompt, tokens, ids: tokens.map((one) => one.id), source: [] };
  }
  const { tokens } = await inspect("encode", { text: asked.text });
  const ids = tokens.map((one) => one.id);
  if (model.kind !== "encoder-decoder") return { text: asked.text, tokens, ids, source: [] };
  return { text: asked.text, tokens, ids: [model.start_id], source: ids };
}

/** The ids of generated tokens. */
export async function idsOf(tokens) {
  const { ids } = await inspect("ids", { bytes: tokens.map((one) => one.hex) });
  const unknown = ids.indexOf(null);
  if (unknown >= 0) throw new Error(`The token ${tokens[unknown].name} is not in the vocabulary.`);
  return ids;
}
