// Start the page: the tabs, the theme, and the view that the address names.

import { describeModel } from "./api.js";
import { byId, h } from "./dom.js";
import { onChange, state, VIEWS, viewAddress } from "./state.js";
import { currentSubject } from "./subject.js";
import { showStrip } from "./strip.js";
import { showCoach } from "./tour.js";
import * as attention from "./attention.js";
import * as chat from "./chat.js";
import * as circuit from "./circuit.js";
import * as cost from "./cost.js";
import * as engine from "./engine.js";
import * as lens from "./lens.js";
import * as runs from "./runs.js";
import * as tokens from "./tokens.js";

const modules = { chat, tokens, attention, lens, circuit, cost, engine, runs };
const ABOUT_TEXT = ["tokens", "attention", "lens", "circuit"]; // views of one text, which stands above them
let closeView = null;
let shown = 0;

function drawTabs() {
  const tabs = VIEWS.map((view) => {
    const current = view === state.view ? "page" : null;
    return h("li", {}, h("a", { href: viewAddress(view), "aria-current": current }, view[0].toUpperCase() + view.slice(1)));
  });
  byId("tabs").replaceChildren(...tabs);
  const active = byId("tabs").querySelector("[aria-current]");
  const nav = byId("tabs").parentElement;
  nav.scrollLeft = active.offsetLeft - nav.clientWidth / 2;
}

/** Show the view of the address. A view that is left stops what it was doing. */
async function show() {
  const turn = ++shown;
  closeView?.();
  closeView = null;
  drawTabs();
  byId("popover").hidden = true;
  showCoach();
  byId("view-title").textContent = state.view[0].toUpperCase() + state.view.slice(1);
  document.title = state.view === "chat" ? "Clearhead" : `${state.view[0].toUpperCase()}${state.view.slice(1)} · Clearhead`;
  const main = byId("main");
  try {
    if (!ABOUT_TEXT.includes(state.view)) {
      byId("subject").hidden = true;
      main.className = `view-${state.view}`;
      closeView = (await modules[state.view].show(main)) ?? null;
      return;
    }
    main.classList.add("busy");
    const subject = await currentSubject();
    const info = await subject.info;
    if (turn !== shown) return;
    main.className = `view-${state.view}`;
    let view = null;
    const strip = await showStrip(subject, info, (place) => view?.choose(place));
    view = await modules[state.view].show(main, subject, info, strip);
    strip.color(); // after what the view needs first
    if (turn === shown) closeView = view?.close ?? null;
    else view?.close?.();
  } catch (error) {
    if (turn !== shown || error.name === "AbortError") return;
    main.className = "";
    byId("subject").hidden = true;
    main.replaceChildren(h("p", { class: "error" }, error.message), h("p", {}, h("a", { href: "#/chat" }, "Back to the chat and the examples")));
    if (!error.status && error.name !== "Error") console.warn(error);
  }
}

function toggleTheme() {
  const order = ["auto", "light", "dark"];
  const next = order[(order.indexOf(document.documentElement.dataset.theme || "auto") + 1) % order.length];
  localStorage.setItem("clearhead-theme", next);
  applyTheme();
  show();
}

function applyTheme() {
  const theme = localStorage.getItem("clearhead-theme") ?? "auto";
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = { auto: "◐ Auto", light: "☀ Light", dark: "☾ Dark" }[theme];
  byId("theme").setAttribute("aria-label", `Theme: ${theme}`);
}

applyTheme();
byId("theme").addEventListener("click", toggleTheme);
byId("skip").addEventListener("click", () => byId("main").focus());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show());
onChange(show);
show();
describeModel().then((model) => {
  byId("model").textContent = model.error ? "no model: examples only" : model.name;
  if (!model.error) byId("model").title = model.description;
});
