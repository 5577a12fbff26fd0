"""From a number to a colour, the same in the terminal, in pictures and on pages.

    mix(DARK, 0.5)   # (46, 123, 169)

Two ramps from the ground of a page to its strongest contrast, for light and for dark pages. Black or white ink on any
colour has a contrast of at least √21 = 4.58, above the 4.5 that WCAG 2.2 §1.4.3 asks for.
"""

from torch import Tensor

Colour = tuple[int, int, int]  # red, green, blue from 0 to 255

LIGHT: tuple[Colour, ...] = (
    (255, 255, 255),
    (207, 227, 243),
    (134, 184, 221),
    (60, 130, 184),
    (18, 79, 134),
    (6, 38, 77),
)
DARK: tuple[Colour, ...] = ((20, 23, 28), (22, 50, 79), (29, 95, 143), (63, 151, 196), (147, 207, 232), (242, 251, 255))
MASKED: dict[str, Colour] = {"light": (232, 226, 217), "dark": (48, 43, 38)}  # warm, unlike every colour of the ramps
NUM_SHADES = 21


def mix(ramp: tuple[Colour, ...], share: float) -> Colour:
    """The colour at `share` of the way, from 0 to 1."""
    place = min(max(share, 0.0), 1.0) * (len(ramp) - 1)
    step = min(int(place), len(ramp) - 2)
    red, green, blue = (
        round(low + (high - low) * (place - step)) for low, high in zip(ramp[step], ramp[step + 1], strict=True)
    )
    return red, green, blue


def weight_shares(weights: Tensor, highest: float | None = None) -> Tensor:
    """How far up the ramp each weight stands: by its root, so that small ones show; `highest` None: of the largest."""
    weights = weights.double()
    return (weights / (highest or weights.max().clamp(min=1e-300))).sqrt()


def score_shares(scores: Tensor) -> Tensor:
    """The same for numbers of any sign, linearly between the smallest and the largest; what is not finite is 0."""
    finite = scores.isfinite()
    kept = scores.double()[finite]
    if not len(kept) or kept.min() == kept.max():
        return finite * 0.5
    return ((scores.double() - kept.min()) / (kept.max() - kept.min())).masked_fill(~finite, 0.0)


def luminance(colour: Colour) -> float:
    """Relative luminance, WCAG 2.2."""
    parts = [part / 255 for part in colour]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: Colour, other: Colour) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def ink(ground: Colour) -> Colour:
    """Black or white, whichever reads better on `ground`."""
    black, white = (0, 0, 0), (255, 255, 255)
    return black if contrast(black, ground) >= contrast(white, ground) else white


def hexadecimal(colour: Colour) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)


def shade_of(share: float) -> str:
    """The class of a table cell on a page."""
    return f"shade-{round(share * (NUM_SHADES - 1))}"


def shade_styles() -> str:
    """The style sheet of those classes, and of `masked`, for both themes."""
    sheets = {}
    for theme, ramp in (("light", LIGHT), ("dark", DARK)):
        grounds = {shade_of(step / (NUM_SHADES - 1)): mix(ramp, step / (NUM_SHADES - 1)) for step in range(NUM_SHADES)}
        grounds["masked"] = MASKED[theme]
        sheets[theme] = "".join(
            f".{name}{{background:{hexadecimal(ground)};color:{hexadecimal(ink(ground))}}}\n"
            for name, ground in grounds.items()
        )
    return f"{sheets['light']}@media (prefers-color-scheme: dark) {{\n{sheets['dark']}}}\n"
