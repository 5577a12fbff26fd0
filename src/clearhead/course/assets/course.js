"use strict";
// Look up the frame of the chosen stops. All numbers were computed when the page was written.
const widgets = JSON.parse(document.getElementById("data").textContent);

function frameIndex(widget, inputs) {
  return widget.controls.reduce((index, control, number) => index * control.stops.length + Number(inputs[number].value), 0);
}

function showBars(root, rows) {
  const values = rows[0];
  const texts = root.querySelectorAll("text.value");
  root.querySelectorAll("rect.bar").forEach((bar, number) => {
    const height = 120 * values[number];
    bar.setAttribute("y", String(140 - height));
    bar.setAttribute("height", String(height));
    if (texts.length) texts[number].textContent = values[number].toFixed(4);
  });
}

function showGrid(root, rows, numShades) {
  root.querySelectorAll("tbody tr").forEach((row, i) => {
    row.querySelectorAll("td").forEach((cell, j) => {
      const value = rows[i][j];
      cell.textContent = value.toFixed(3);
      cell.className = "shade-" + Math.round(Math.sqrt(value) * (numShades - 1));
    });
  });
}

function showVectors(root, rows) {
  rows.forEach(([x, y], number) => {
    const line = root.querySelector("line.line-" + number);
    const tip = root.querySelector("circle.tip-" + number);
    line.setAttribute("x2", String(90 * x));
    line.setAttribute("y2", String(-90 * y));
    tip.setAttribute("cx", String(90 * x));
    tip.setAttribute("cy", String(-90 * y));
  });
}

const SHOW = { bars: showBars, grid: showGrid, vectors: showVectors };

for (const [name, widget] of Object.entries(widgets)) {
  const root = document.getElementById("widget-" + name);
  const inputs = widget.controls.map((control, number) => document.getElementById(name + "-" + number));
  const update = () => {
    const frame = widget.frames[frameIndex(widget, inputs)];
    SHOW[widget.kind](root, frame.values, widget.numShades);
    root.querySelector("output").textContent = frame.note;
    widget.controls.forEach((control, number) => {
      const stop = control.stops[Number(inputs[number].value)];
      if (control.is_choice) return;
      inputs[number].setAttribute("aria-valuetext", stop);
      inputs[number].parentElement.querySelector(".stop").textContent = stop;
    });
  };
  inputs.forEach((input) => input.addEventListener("input", update));
  root.querySelector(".controls").hidden = false;
  update(); // a browser may restore the controls of an earlier visit
}
