// Map numbers to colors as inspection/colors.py does, in the reader's theme.

const darkTheme = window.matchMedia("(prefers-color-scheme: dark)");

function interpolate(ramp, intensity) {
  const place = Math.min(Math.max(intensity, 0), 1) * (ramp.length - 1);
  const step = Math.min(Math.floor(place), ramp.length - 2);
  return ramp[step].map((low, channel) => Math.round(low + (ramp[step + 1][channel] - low) * (place - step)));
}

const themeName = () => (darkTheme.matches ? "dark" : "light");
const colorOf = (intensity) => interpolate(data.ramps[themeName()], intensity);
const cssColor = (channels) => `rgb(${channels.join(",")})`;

function textColor(background) {
  const [red, green, blue] = background
    .map((channel) => channel / 255)
    .map((channel) => (channel <= 0.04045 ? channel / 12.92 : ((channel + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#000" : "#fff"; // equal contrast at 0.179
}

function shade(element, intensity) {
  const background = colorOf(intensity);
  element.style.backgroundColor = cssColor(background);
  element.style.color = textColor(background);
}

/** Draw a matrix with one pixel per cell; `intensityAt` returns the intensity of a cell, or null if it is masked. */
function drawPixels(width, height, intensityAt) {
  const palette = Array.from({ length: 256 }, (_, step) => colorOf(step / 255));
  const image = new ImageData(width, height);
  for (let cell = 0; cell < width * height; cell++) {
    const intensity = intensityAt(cell);
    const channels = intensity === null ? data.masked[themeName()] : palette[Math.round(intensity * 255)];
    image.data.set(channels, 4 * cell);
    image.data[4 * cell + 3] = 255;
  }
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}
