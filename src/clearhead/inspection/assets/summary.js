// Say where the attention of the selected head goes, why the page opens on a head, and link to the next ones.

/** The specific shares of all heads, the largest first. */
const specificShares = data.views
  .flatMap((view) => view.layers.flatMap((layer) => (layer.shares ? layer.shares.specific : [])))
  .sort((one, other) => other - one);

const isHead = (one, other) => one.view === other.view && one.layer === other.layer && one.head === other.head;

const PATTERN_NAMES = { itself: "the token itself" };

/** The patterns as text: "the first token, the token itself, the previous token". */
const describePatterns = (names) => names.map((name) => PATTERN_NAMES[name] ?? `the ${name}`).join(", ");

function showSummary() {
  const { shares } = currentLayer();
  byId("shares").replaceChildren();
  byId("reason").hidden = byId("shares").hidden = !shares;
  if (!shares) return;
  const patterns = Object.keys(shares).slice(0, -3); // the last are even spread, common tokens and specific
  const own = shares.specific[state.head];
  const rank = specificShares.indexOf(own) + 1;
  const isStart = isHead(state, data.start);
  const why =
    rank === 1
      ? `This is the largest specific share of ${data.num_heads} heads${isStart ? ", so the page opens here" : ""}.`
      : `This share is number ${rank} of ${data.num_heads} heads${isStart ? "; the page opens here as requested" : ""}.`;
  byId("reason").textContent =
    `${formatPercent(own)} of this head’s attention is specific: beyond ${describePatterns(patterns)}, an even spread over the rest, and tokens that attract every query. ${why}`;
  const bar = createElement("div", null, { class: "bar", "aria-hidden": "true" });
  const list = createElement("ul", null, { "aria-label": "Shares of this head’s attention" });
  Object.entries(shares).forEach(([name, values]) => {
    const share = values[state.head];
    const kind = `share-${name.replace(" ", "-")}`;
    const segment = createElement("span", null, { class: kind });
    segment.style.flexGrow = share;
    bar.append(segment);
    const item = createElement("li", null);
    item.append(createElement("span", null, { class: `swatch ${kind}`, "aria-hidden": "true" }));
    item.append(`${name} ${formatPercent(share)}`);
    list.append(item);
  });
  byId("shares").append(bar, list);
}

function addRanking() {
  const container = byId("ranking");
  container.hidden = data.ranking.length < 2;
  container.append(createElement("span", "Most specific heads:"));
  for (const head of data.ranking) {
    const { title } = data.views[head.view];
    const prefix = data.views.length > 1 ? `${title.split(/[ -]/)[0]} ` : ""; // "cross" for "cross-attention"
    const button = createElement("button", `${prefix}L${head.layer} H${head.head} `, {
      type: "button",
      title: `${title}, layer ${head.layer}, head ${head.head}: ${formatPercent(head.specific)} specific`,
    });
    button.append(createElement("small", formatPercent(head.specific)));
    button.addEventListener("click", () => openHead(head));
    container.append(button);
  }
}

function markRanking() {
  byId("ranking")
    .querySelectorAll("button")
    .forEach((button, number) => button.setAttribute("aria-pressed", isHead(state, data.ranking[number])));
}

/** Show a head at a cell, and the thumbnails of its view. */
function openHead({ view, layer, head, row, column }) {
  const viewChanged = view !== state.view;
  Object.assign(state, { view, layer, head, row, column });
  if (viewChanged) showView();
  else {
    showHead();
    showLens();
  }
}
