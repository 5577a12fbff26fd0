// The state of the page is its address: #/attention?layer=3&head=2&text=... A link shows the same again.

export const VIEWS = ["chat", "tokens", "attention", "lens", "circuit", "cost", "engine", "runs"];
const listeners = new Set();
const WRITE_MILLISECONDS = 150; // browsers refuse to write the address hundreds of times a minute
let writing = 0;
export const state = { view: "chat", params: new URLSearchParams() };

function read() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  state.view = VIEWS.includes(path) ? path : "chat";
  state.params = new URLSearchParams(query);
}

/** What names the text under inspection; it stays when the view changes. */
export const SUBJECT_KEYS = ["text", "source", "ids", "from", "example", "prompt", "first", "rate"];

export function address(view, params) {
  const query = new URLSearchParams([...params].filter(([, value]) => value !== "" && value !== null)).toString();
  return `#/${view}${query ? `?${query}` : ""}`;
}

/** The address of another view of the same text. */
export function viewAddress(view) {
  const kept = new URLSearchParams([...state.params].filter(([key]) => SUBJECT_KEYS.includes(key) || key === "at" || key === "tour"));
  return address(view, kept);
}

/** Go to a view; `params` replaces the parameters. */
export function go(view, params) {
  clearTimeout(writing);
  location.hash = address(view, new URLSearchParams(params)).slice(1);
}

/** Change some parameters of this view without a new entry in the history. Null removes one. */
export function update(changes) {
  for (const [key, value] of Object.entries(changes))
    if (value === null || value === undefined) state.params.delete(key);
    else state.params.set(key, String(value));
  clearTimeout(writing);
  writing = setTimeout(() => history.replaceState(null, "", address(state.view, state.params)), WRITE_MILLISECONDS);
}

export function number(key, fallback) {
  const text = state.params.get(key);
  const value = text === null || text === "" ? NaN : Number(text);
  return Number.isInteger(value) ? value : fallback;
}

export function onChange(listener) {
  listeners.add(listener);
}

addEventListener("hashchange", () => {
  clearTimeout(writing);
  read();
  for (const listener of listeners) listener();
});
read();

/** Token ids as short text, and back. */
export const packIds = (ids) => ids.map((id) => id.toString(36)).join(".");
export const unpackIds = (text) => (text ? text.split(".").map((part) => parseInt(part, 36)).filter(Number.isInteger) : []);
