// One answer: its tokens colored by probability, the alternatives to each, its numbers, and links to the other views.

import { paint, surpriseColor } from "./colors.js";
import { byId, duration, h, percent, visible } from "./dom.js";
import { fromHex, pieces } from "./generation.js";
import { surpriseLegend } from "./strip.js";

const probability = (token) => (token.logprob === null ? null : Math.exp(token.logprob));

/** The element of an answer. `actions`: branch(place, alternative), open(view, place), retry(), choose(version). */
export function answerElement(message, actions) {
  const answer = message.versions[message.active];
  const body = h("div", { class: "answer-text", role: "group", "aria-label": "Answer; the arrow keys move from token to token" });
  const texts = pieces(answer.tokens);
  answer.tokens.forEach((token, place) => body.append(tokenElement(token, texts[place], place)));
  listen(body, answer, actions);
  const element = h("article", { class: "message assistant" }, h("h3", { class: "who" }, "Model"), body, footer(message, answer, actions));
  return element;
}

function tokenElement(token, text, place) {
  const value = probability(token);
  const span = h("span", { class: `tok${token.branched ? " branched" : ""}${token.silent ? " special" : ""}`, role: "button", tabindex: place === 0 ? 0 : -1, "data-place": place, "aria-label": `${visible(text)} ${percent(value)}` }, text);
  if (value !== null && !token.silent) paint(span, surpriseColor(value));
  return span;
}

/** Append the last token to an answer that is still being generated. */
export function appendToken(element, answer) {
  const body = element.querySelector(".answer-text");
  const place = answer.tokens.length - 1;
  if (!decoders.has(answer)) decoders.set(answer, new TextDecoder());
  const text = decoders.get(answer).decode(fromHex(answer.tokens[place].hex), { stream: true });
  body.append(tokenElement(answer.tokens[place], text, place));
}

const decoders = new WeakMap(); // of answers that are being generated: a character may be split over tokens

function listen(body, answer, actions) {
  const spanOf = (event) => event.target.closest?.(".tok");
  body.addEventListener("mousemove", (event) => {
    // Not mouseover, which also comes when a new token appears below a pointer that rests.
    const span = spanOf(event);
    if (span && (span !== anchor || byId("popover").hidden)) showAlternatives(span, answer, actions, false);
  });
  body.addEventListener("focusin", (event) => spanOf(event) && showAlternatives(spanOf(event), answer, actions, false));
  body.addEventListener("mouseleave", () => scheduleHide());
  body.addEventListener("click", (event) => spanOf(event) && showAlternatives(spanOf(event), answer, actions, true));
  body.addEventListener("keydown", (event) => {
    const span = spanOf(event);
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!span) return;
    if (step) {
      event.preventDefault();
      const next = step > 0 ? span.nextElementSibling : span.previousElementSibling;
      if (!next) return;
      span.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      showAlternatives(span, answer, actions, true);
      byId("popover").querySelector("button")?.focus();
    } else if (event.key === "Escape") hide();
  });
}

let hideTimer = 0;
let pinned = false;
let anchor = null;

function scheduleHide() {
  clearTimeout(hideTimer);
  if (!pinned) hideTimer = setTimeout(hide, 250);
}

function hide() {
  pinned = false;
  byId("popover").hidden = true;
}

function showAlternatives(span, answer, actions, pin) {
  if (pinned && !pin && span !== anchor) {
    if (document.activeElement && byId("popover").contains(document.activeElement)) return;
  }
  clearTimeout(hideTimer);
  pinned = pin;
  anchor = span;
  const place = Number(span.dataset.place);
  const token = answer.tokens[place];
  const popover = byId("popover");
  const rows = candidatesOf(token).map((other) => candidateRow(other, token, () => {
    hide();
    actions.branch(place, other);
  }));
  popover.replaceChildren(
    h("p", { class: "small muted" }, `Token ${place + 1}: what the model considered here`),
    h("ul", { class: "candidates" }, ...rows),
    h("p", { class: "small muted" }, "Choose another one to continue from there."),
    h("div", { class: "row" }, h("span", { class: "small muted" }, "Open here:"), ...["attention", "lens", "circuit"].map((view) => h("button", { type: "button", onclick: () => (hide(), actions.open(view, place)) }, view))),
  );
  popover.onmouseenter = () => clearTimeout(hideTimer);
  popover.onmouseleave = scheduleHide;
  popover.onkeydown = (event) => {
    if (event.key !== "Escape") return;
    hide();
    span.focus();
  };
  popover.hidden = false;
  position(popover, span);
}

function candidatesOf(token) {
  const others = token.alternatives.some((other) => other.hex === token.hex) ? token.alternatives : [...token.alternatives, token];
  return [...others].sort((one, other) => (other.logprob ?? 0) - (one.logprob ?? 0));
}

function candidateRow(other, token, branch) {
  const chosen = other.hex === token.hex;
  const value = probability(other);
  const bar = h("span", { class: "bar", "aria-hidden": "true" });
  bar.style.setProperty("--share", String(value ?? 0));
  const inside = [h("span", { class: "name" }, visible(other.name, 24)), " ", bar, h("span", { class: "value" }, percent(value)), chosen ? h("span", { class: "offscreen" }, ", chosen") : null];
  return h("li", {}, h("button", { type: "button", class: chosen ? "candidate chosen" : "candidate", disabled: chosen, onclick: branch }, ...inside));
}

function position(popover, span) {
  const box = (span.getClientRects()[0] ?? span.getBoundingClientRect());
  const [width, height] = [popover.offsetWidth, popover.offsetHeight];
  const left = Math.min(Math.max(box.left, 8), document.documentElement.clientWidth - width - 8);
  const below = box.bottom + 6 + height < innerHeight || box.top < height + 12;
  popover.style.setProperty("left", `${Math.max(left, 8) + scrollX}px`);
  popover.style.setProperty("top", `${(below ? box.bottom + 6 : box.top - height - 6) + scrollY}px`);
}

function footer(message, answer, actions) {
  const parts = [h("p", { class: "stats small muted" }, statsText(answer))];
  if (answer.error) parts.push(h("p", { class: "error" }, answer.error));
  const open = ["tokens", "attention", "lens", "circuit", "cost"].map((view) => h("button", { type: "button", class: "quiet", onclick: () => actions.open(view, null) }, view[0].toUpperCase() + view.slice(1)));
  const versions = message.versions.length > 1 ? versionButtons(message, actions) : null;
  const again = h("button", { type: "button", class: "quiet", onclick: actions.retry }, "↻ Again");
  parts.push(h("div", { class: "row open-row" }, h("span", { class: "small muted" }, "Open in"), ...open, again, versions, surpriseLegend()));
  return h("footer", {}, ...parts);
}

function versionButtons(message, actions) {
  const move = (step) => actions.choose((message.active + step + message.versions.length) % message.versions.length);
  return h(
    "span",
    { class: "row versions" },
    h("button", { type: "button", class: "quiet", "aria-label": "Previous version", onclick: () => move(-1) }, "‹"),
    h("span", { class: "small" }, `${message.active + 1} of ${message.versions.length}`),
    h("button", { type: "button", class: "quiet", "aria-label": "Next version", onclick: () => move(1) }, "›"),
  );
}

export function statsText(answer) {
  const { stats, tokens, finish } = answer;
  const known = tokens.filter((one) => one.logprob !== null);
  const mean = known.reduce((sum, one) => sum + one.logprob, 0) / (known.length || 1);
  const parts = [`${tokens.length} tokens`];
  if (stats.rate) parts.push(`${stats.rate.toFixed(1)} tok/s`);
  if (stats.firstSeconds !== undefined) parts.push(`first after ${duration(stats.firstSeconds)}`);
  if (stats.promptTokens) parts.push(`${stats.promptTokens} in the prompt${stats.cachedTokens ? `, ${stats.cachedTokens} cached` : ""}`);
  if (known.length) parts.push(`perplexity ${Math.exp(-mean).toFixed(2)}`);
  if (finish) parts.push({ stop: "ended by itself", length: "length limit", stopped: "stopped" }[finish] ?? finish);
  return parts.join(" · ");
}

addEventListener("pointerdown", (event) => {
  const popover = byId("popover");
  if (!popover.hidden && !popover.contains(event.target) && !event.target.closest?.(".tok")) hide();
});
