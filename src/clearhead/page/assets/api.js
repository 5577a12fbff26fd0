// Talk to the server: questions about the model, and streamed texts.

import { h } from "./dom.js";

export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

const KEY = "clearhead-api-key";
const headers = () => {
  const key = sessionStorage.getItem(KEY);
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
};

/** Send a request and return its response. A server that needs a key asks for it once. */
export async function send(path, body, signal) {
  let response;
  try {
    const method = body === undefined ? "GET" : "POST";
    response = await fetch(path, { method, headers: headers(), body: body === undefined ? undefined : JSON.stringify(body), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server does not answer. Is it still running?", 0);
  }
  if (response.status === 401 && (await askForKey())) return send(path, body, signal);
  if (!response.ok) throw new ServerError(await messageOf(response), response.status);
  return response;
}

async function messageOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}

let asking = null;

function askForKey() {
  asking ??= new Promise((resolve) => {
    const input = h("input", { type: "password", id: "api-key", autocomplete: "off" });
    const dialog = h(
      "dialog",
      { class: "panel", "aria-label": "API key" },
      h("form", { method: "dialog" }, h("p", {}, h("label", { for: "api-key" }, "This server needs an API key.")), h("p", {}, input), h("button", { class: "primary" }, "Use this key")),
    );
    dialog.addEventListener("close", () => {
      const key = input.value.trim();
      if (key) sessionStorage.setItem(KEY, key);
      dialog.remove();
      asking = null;
      resolve(Boolean(key));
    });
    document.body.append(dialog);
    dialog.showModal();
  });
  return asking;
}

/** Ask a question about the model (server/inspection_data.py). */
export async function inspect(question, body = {}, signal = undefined) {
  return (await send(`/inspect/${question}`, body, signal)).json();
}

/** Yield the JSON objects of a stream of server-sent events. */
export async function* events(path, body, signal) {
  const response = await send(path, { ...body, stream: true }, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ServerError(event.error.message, 200);
      yield event;
    }
  }
}

const TYPES = { float32: Float32Array, uint8: Uint8Array };

/** The typed array of {type, shape, data}. */
export function arrayOf({ type, data }) {
  const text = atob(data);
  const bytes = new Uint8Array(text.length);
  for (let place = 0; place < text.length; place++) bytes[place] = text.charCodeAt(place);
  return new TYPES[type](bytes.buffer);
}

let model = null;

/** What the served model is; null if the server does not answer, so that the bundled examples still work. */
export function describeModel() {
  model ??= inspect("model").catch((error) => {
    model = null;
    return { error: error.message };
  });
  return model;
}
