// From a number to a colour, as inspection/colours.py does it, in the theme of the reader.

const darkTheme = window.matchMedia("(prefers-color-scheme: dark)");

function mix(ramp, share) {
  const place = Math.min(Math.max(share, 0), 1) * (ramp.length - 1);
  const step = Math.min(Math.floor(place), ramp.length - 2);
  return ramp[step].map((low, part) => Math.round(low + (ramp[step + 1][part] - low) * (place - step)));
}

const theme = () => (darkTheme.matches ? "dark" : "light");
const colour = (share) => mix(data.ramps[theme()], share);
const css = (parts) => `rgb(${parts.join(",")})`;

function ink(parts) {
  const [red, green, blue] = parts
    .map((part) => part / 255)
    .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#000" : "#fff"; // where black and white read alike
}

function shade(element, share) {
  const ground = colour(share);
  element.style.backgroundColor = css(ground);
  element.style.color = ink(ground);
}

/** A matrix as pixels; `share` says how far up the ramp a cell stands, or null for masked. */
function pixels(width, height, share) {
  const steps = Array.from({ length: 256 }, (_, step) => colour(step / 255));
  const image = new ImageData(width, height);
  for (let place = 0; place < width * height; place++) {
    const found = share(place);
    const parts = found === null ? data.masked[theme()] : steps[Math.round(found * 255)];
    image.data.set(parts, 4 * place);
    image.data[4 * place + 3] = 255;
  }
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}
