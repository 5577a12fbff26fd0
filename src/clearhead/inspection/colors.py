"""Map numbers to colors, the same way in the terminal, in pictures and on pages.

    interpolate(DARK, 0.5)   # (46, 123, 169)

There are two color ramps, for light and for dark pages, each from the background to the strongest contrast with it.
Black or white text on any color has a contrast of at least √21 = 4.58, above the 4.5 required by WCAG 2.2 §1.4.3.
"""

from torch import Tensor

Color = tuple[int, int, int]  # red, green, blue from 0 to 255

LIGHT: tuple[Color, ...] = (
    (255, 255, 255),
    (207, 227, 243),
    (134, 184, 221),
    (60, 130, 184),
    (18, 79, 134),
    (6, 38, 77),
)
DARK: tuple[Color, ...] = ((20, 23, 28), (22, 50, 79), (29, 95, 143), (63, 151, 196), (147, 207, 232), (242, 251, 255))
MASKED: dict[str, Color] = {"light": (232, 226, 217), "dark": (48, 43, 38)}  # warm, unlike every color of the ramps
NUM_SHADES = 21


def interpolate(ramp: tuple[Color, ...], intensity: float) -> Color:
    """Return the color of a ramp at an intensity from 0 (its start) to 1 (its end)."""
    place = min(max(intensity, 0.0), 1.0) * (len(ramp) - 1)
    step = min(int(place), len(ramp) - 2)
    red, green, blue = (
        round(low + (high - low) * (place - step)) for low, high in zip(ramp[step], ramp[step + 1], strict=True)
    )
    return red, green, blue


def weight_intensities(weights: Tensor, highest: float | None = None) -> Tensor:
    """Return intensities from 0 to 1: the square root of weight / highest, so that small weights remain visible.

    highest: the weight with intensity 1; None takes the largest of the tensor.
    """
    weights = weights.double()
    return (weights / (highest or weights.max().clamp(min=1e-300))).sqrt()


def score_intensities(scores: Tensor) -> Tensor:
    """Return intensities that are linear between the smallest and the largest finite score; others get 0."""
    is_finite = scores.isfinite()
    finite = scores.double()[is_finite]
    if not len(finite) or finite.min() == finite.max():
        return is_finite * 0.5
    return ((scores.double() - finite.min()) / (finite.max() - finite.min())).masked_fill(~is_finite, 0.0)


def _luminance(color: Color) -> float:
    """Return the relative luminance as defined by WCAG 2.2."""
    channels = [channel / 255 for channel in color]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: Color, other: Color) -> float:
    """Return the contrast ratio of two colors as defined by WCAG 2.2, from 1 to 21."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def text_color(background: Color) -> Color:
    """Return black or white, whichever has more contrast with the background."""
    black, white = (0, 0, 0), (255, 255, 255)
    return black if contrast(black, background) >= contrast(white, background) else white


def to_hex(color: Color) -> str:
    """Return a color as #rrggbb."""
    return "#{:02x}{:02x}{:02x}".format(*color)


def shade_class(intensity: float) -> str:
    """Return the CSS class of a table cell with this intensity."""
    return f"shade-{round(intensity * (NUM_SHADES - 1))}"


def shade_styles() -> str:
    """Return the CSS rules of all shade classes and of `masked`, for both themes."""
    sheets = {}
    for theme, ramp in (("light", LIGHT), ("dark", DARK)):
        intensities = [step / (NUM_SHADES - 1) for step in range(NUM_SHADES)]
        backgrounds = {shade_class(intensity): interpolate(ramp, intensity) for intensity in intensities}
        backgrounds["masked"] = MASKED[theme]
        sheets[theme] = "".join(
            f".{name}{{background:{to_hex(background)};color:{to_hex(text_color(background))}}}\n"
            for name, background in backgrounds.items()
        )
    return f"{sheets['light']}@media (prefers-color-scheme: dark) {{\n{sheets['dark']}}}\n"
