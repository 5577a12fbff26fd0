// The chat: messages, the answer as it streams, branches from any token, and the prompt as the template made it.

import { describeModel } from "./api.js";
import { answerElement, appendToken, statsText } from "./answer.js";
import { announce, byId, h } from "./dom.js";
import { generate, idsOf, promptOf, textOf } from "./generation.js";
import { settings, settingsPanel } from "./settings.js";
import { go } from "./state.js";
import { subjectParams } from "./subject.js";
import { exampleCards } from "./tour.js";

const STORE = "clearhead-conversation";
const conversation = load();
let running = null; // the AbortController of the answer that is being generated

function load() {
  try {
    return JSON.parse(sessionStorage.getItem(STORE)) ?? [];
  } catch {
    return [];
  }
}

function save() {
  try {
    sessionStorage.setItem(STORE, JSON.stringify(conversation));
  } catch {
    sessionStorage.removeItem(STORE); // too long for the browser's store: the conversation lives as long as the page
  }
}

export async function show(main) {
  const input = h("textarea", { id: "message", rows: 2, "aria-label": "Message", placeholder: "Ask the model something", onkeydown: (event) => event.key === "Enter" && !event.shiftKey && (event.preventDefault(), submit(input)) });
  const button = h("button", { id: "send", class: "primary", type: "button", onclick: () => (running ? running.abort() : submit(input)) }, "Send");
  const list = h("div", { id: "messages" });
  const composer = h("div", { id: "composer", class: "panel" }, input, h("div", { class: "row spread" }, h("span", { class: "small muted" }, "Enter sends, Shift+Enter starts a line"), button));
  main.replaceChildren(h("div", { class: "chat" }, h("div", { class: "talk" }, list, composer), settingsPanel(conversation, clear, asked)));
  draw();
  describeModel().then((model) => {
    if (model.error) composer.replaceChildren(h("p", { class: "muted" }, "No model answers here. The examples above work without one; to chat, run: clearhead serve smollm2"));
    else if (model.kind === "encoder") composer.replaceChildren(h("p", { class: "muted" }, "This model is an encoder: it generates no text. Type a text in the Attention view to look inside."));
    else if (!model.chats) input.placeholder = model.kind === "encoder-decoder" ? "Type a source text" : "Type the beginning of a text";
  });
  if (matchMedia("(pointer: fine)").matches) input.focus({ preventScroll: true });
}

function clear() {
  running?.abort();
  conversation.length = 0;
  save();
  draw();
}

function draw() {
  const list = byId("messages");
  if (!list) return;
  if (!conversation.length) return list.replaceChildren(welcome());
  list.replaceChildren(...conversation.map((message, place) => (message.role === "assistant" ? answerElement(message, actionsOf(place)) : userElement(message))));
}

function welcome() {
  return h(
    "div",
    { class: "welcome" },
    h("h1", {}, "Ask. Then open any answer."),
    h("p", { class: "lead" }, "Every token of an answer shows how sure the model was. Choose another one to branch from there, or open the answer to see where the model looked, what each layer believed, and which heads decided."),
    exampleCards(),
  );
}

const userElement = (message) => h("article", { class: "message user" }, h("h3", { class: "who" }, "You"), h("p", {}, message.content));

/** What was asked before the answer at `place`: messages for a chat model, the last text for others. */
async function asked(place = conversation.length) {
  const model = await describeModel();
  const before = conversation.slice(0, place);
  if (!model.chats) return { text: before.filter((one) => one.role === "user").at(-1)?.content ?? "" };
  const messages = before.map((one) => ({ role: one.role, content: one.role === "user" ? one.content : textOf(one.versions[one.active].tokens) }));
  return { messages: settings.system ? [{ role: "system", content: settings.system }, ...messages] : messages };
}

async function submit(input) {
  const content = input.value.trim();
  if (!content || running) return;
  input.value = "";
  conversation.push({ role: "user", content }, { role: "assistant", versions: [], active: 0 });
  await answerAt(conversation.length - 1, []);
}

const newAnswer = (tokens) => ({ tokens, stats: {}, finish: null });

/** Generate a new version of the answer at `place`, after the tokens `kept`. */
async function answerAt(place, kept) {
  const message = conversation[place];
  const answer = newAnswer([...kept]);
  message.versions.push(answer);
  message.active = message.versions.length - 1;
  draw();
  const controller = (running = new AbortController());
  setButton("Stop");
  try {
    const question = await asked(place);
    const request = kept.length ? { prompt: await branchPrompt(question, kept) } : question.messages ? question : { prompt: question.text };
    await generate(request, settings, answer, controller.signal, () => showToken(place, answer));
  } catch (error) {
    answer.error = error.message;
    answer.finish = "error";
  }
  running = null;
  setButton("Send");
  save();
  draw();
  announce(answer.error ?? `Answer: ${textOf(answer.tokens)}`);
}

async function branchPrompt(question, kept) {
  const { ids, source } = await promptOf(question);
  if (source.length) throw new Error("Branching needs a decoder-only model; this one has an encoder.");
  return [...ids, ...(await idsOf(kept))];
}

function setButton(text) {
  const button = byId("send");
  if (!button) return;
  button.textContent = text;
  button.classList.toggle("stop", text === "Stop");
}

function showToken(place, answer) {
  const element = byId("messages")?.children[place];
  if (!element) return;
  appendToken(element, answer);
  element.querySelector(".stats").textContent = statsText(answer);
  const nearEnd = innerHeight + scrollY > document.documentElement.scrollHeight - 160;
  if (nearEnd) scrollTo({ top: document.documentElement.scrollHeight });
}

function actionsOf(place) {
  const message = conversation[place];
  const answer = () => message.versions[message.active];
  return {
    branch: (at, alternative) => {
      if (running) return;
      conversation.length = place + 1; // later messages belong to the other branch
      const { hex, name, logprob } = alternative;
      answerAt(place, [...answer().tokens.slice(0, at), { ...answer().tokens[at], hex, name, logprob, branched: true }]);
    },
    retry: () => running || answerAt(place, []),
    choose: (version) => {
      message.active = version;
      save();
      draw();
    },
    open: (view, at) => openAnswer(place, answer(), view, at),
  };
}

async function openAnswer(place, answer, view, at) {
  try {
    const { ids, source } = await promptOf(await asked(place));
    const generated = await idsOf(answer.tokens);
    const { firstSeconds, rate } = answer.stats;
    const measured = { prompt: source.length || ids.length, ...(firstSeconds ? { first: firstSeconds.toFixed(4) } : {}), ...(rate ? { rate: rate.toFixed(2) } : {}) };
    // A token was predicted at the position before it, which is the one to look at.
    const written = answer.tokens.filter((one) => !one.silent).length;
    const position = ids.length + (at === null ? written : at) - 1;
    go(view, subjectParams([...ids, ...generated], source, { ...measured, at: position }));
  } catch (error) {
    answer.error = error.message;
    draw();
  }
}
