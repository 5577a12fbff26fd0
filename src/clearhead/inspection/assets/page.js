// All together: what is chosen stands in the address, and every control leads back here.

const STEPS = { scores: "scores", mask: "after the mask", weights: "weights (softmax)" };
const MODES = { top: "the likeliest tokens here", all: "the likeliest token everywhere" };

let rest = 0;

/**
 * The choice stands in the address, where there is one: a link opens the same head.
 * Browsers allow about a hundred such changes in half a minute, so only a pointer at rest makes one.
 */
function remember() {
  if (location.protocol === "about:") return;
  clearTimeout(rest);
  rest = setTimeout(() => {
    const { view: seen, layer: floor, head: chosen, step, row, column } = state;
    history.replaceState(null, "", `#${[seen, floor, chosen, step, row, column].join("/")}`);
  }, 300);
}

function recall() {
  if (!location.hash) return;
  const [seen, floor, chosen, step, row, column] = location.hash.slice(1).split("/");
  const within = (text, length) => Math.min(Math.max(Number.parseInt(text, 10) || 0, 0), length - 1);
  state.view = within(seen, data.views.length);
  state.layer = within(floor, view().layers.length);
  state.head = within(chosen, layer().heads.length);
  state.row = within(row, view().rows.length);
  state.column = within(column, numKeys());
  if (step in STEPS) state.step = step;
}

function showHead() {
  const found = layer().heads[state.head];
  byId("head-heading").textContent = `${view().title}, layer ${layer().number}, head ${state.head}`;
  byId("matrix").setAttribute(
    "aria-label",
    `Attention of layer ${layer().number}, head ${state.head}; arrow keys move the cell`,
  );
  byId("steps").hidden = !found.scores;
  if (!found.scores) state.step = "weights";
  check("step", state.step);
  markThumbnail();
  drawMatrix();
  showRow();
  tell();
}

function showView() {
  check("view", state.view);
  drawThumbnails();
  showHead();
  showLens();
}

function begin() {
  document.title = data.title;
  byId("title").textContent = data.title;
  byId("subtitle").textContent = data.subtitle;
  choices(
    byId("views"),
    "view",
    Object.fromEntries(data.views.map((each, number) => [number, each.title])),
    (value) => {
      Object.assign(state, { view: Number(value), layer: 0, head: 0, row: 0, column: 0 });
      showView();
    },
  );
  choices(byId("steps"), "step", STEPS, (value) => {
    state.step = value;
    drawMatrix();
    remember();
  });
  choices(byId("lens-modes"), "mode", MODES, (value) => {
    state.mode = value;
    showLens();
  });
  check("mode", state.mode);
  byId("thumbnails").addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    Object.assign(state, { layer: Number(button.dataset.layer), head: Number(button.dataset.head) });
    showHead();
  });
  byId("thumbnails").addEventListener("keydown", moveToHead);
  byId("matrix").addEventListener("pointermove", cellAt);
  byId("matrix").addEventListener("pointerdown", cellAt);
  byId("matrix").addEventListener("keydown", moveByKey);
  byId("text").addEventListener("click", (event) => {
    if (event.target.dataset.column) moveTo(state.row, Number(event.target.dataset.column));
  });
  darkTheme.addEventListener("change", showView);
  let width = 0;
  new ResizeObserver(() => {
    if (byId("figure").clientWidth === width) return;
    width = byId("figure").clientWidth;
    drawMatrix();
  }).observe(byId("figure"));
  Object.assign(state, data.start, { row: view().rows.length - 1 });
  recall();
  showView();
}

begin();
