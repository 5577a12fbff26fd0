// The palette: one ramp for amounts and one pair of hues for signs. Lightness alone tells all steps of the ramp apart, and
// the pair is blue and orange, so neither depends on telling red from green.

const RAMPS = {
  light: ["#ffffff", "#dcecdc", "#9fcfbf", "#4f9fab", "#2a6794", "#272b66"],
  dark: ["#141a22", "#25365e", "#2c6489", "#43999f", "#97cda4", "#f8f3b8"],
};
const SIGNS = {
  light: { middle: "#ffffff", positive: "#0f4c97", negative: "#b3470b" },
  dark: { middle: "#171c24", positive: "#63aaff", negative: "#ff9a4d" },
};
export const MASKED = { light: [236, 232, 222], dark: [38, 35, 32] };
export const LINES = { light: ["#0b5d8f", "#b3470b", "#2b7a5d", "#7a3e91", "#8a6a00", "#444c57", "#a3264f", "#3f6fd1"], dark: ["#7cc7e8", "#ffa45c", "#84d2a8", "#d3a2ea", "#e6cf6a", "#b9c3cf", "#ff9ab8", "#9db8ff"] };
const STEPS = 256;

const parse = (hex) => [1, 3, 5].map((start) => parseInt(hex.slice(start, start + 2), 16));
const mix = (one, other, share) => one.map((channel, place) => Math.round(channel + (other[place] - channel) * share));

export const isDark = () => getComputedStyle(document.documentElement).colorScheme === "dark" || (document.documentElement.dataset.theme !== "light" && document.documentElement.dataset.theme !== "dark" && matchMedia("(prefers-color-scheme: dark)").matches);
export const theme = () => (isDark() ? "dark" : "light");

const tables = {};
for (const name of ["light", "dark"]) {
  const stops = RAMPS[name].map(parse);
  tables[name] = Array.from({ length: STEPS }, (_, step) => {
    const place = (step / (STEPS - 1)) * (stops.length - 1);
    const low = Math.min(Math.floor(place), stops.length - 2);
    return mix(stops[low], stops[low + 1], place - low);
  });
}

/** The color [r, g, b] of an intensity from 0 to 1. */
export const ramp = (intensity) => tables[theme()][Math.round(Math.min(Math.max(intensity || 0, 0), 1) * (STEPS - 1))];

/** The whole ramp of the present theme, for loops over many cells. */
export const rampTable = () => tables[theme()];

/** The color of a number from -1 to 1. */
export function signColor(value) {
  const { middle, positive, negative } = SIGNS[theme()];
  const strength = Math.min(Math.abs(value || 0), 1) ** 0.6;
  return mix(parse(middle), parse(value < 0 ? negative : positive), strength);
}

export const css = ([red, green, blue]) => `rgb(${red} ${green} ${blue})`;

function luminance(color) {
  const [red, green, blue] = color.map((channel) => {
    const share = channel / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

/** Black or white, whichever can be read better on a color: the better one always has a contrast of 4.58 or more. */
export const textOn = (color) => (luminance(color) > 0.179 ? "#000000" : "#ffffff");

/** The value of a color of the style sheet in the present theme: a canvas does not understand light-dark(). */
export function resolved(name) {
  const probe = document.createElement("span");
  probe.style.setProperty("color", `var(${name})`);
  document.body.append(probe);
  const color = getComputedStyle(probe).color;
  probe.remove();
  return color;
}

/** How the background of a token shows its probability: certain ones stay as they are, surprising ones stand out. */
export function surpriseColor(probability) {
  return ramp(0.78 * (1 - probability) ** 1.4);
}

export function paint(element, color) {
  element.style.setProperty("background-color", css(color));
  element.style.setProperty("color", textOn(color));
}
