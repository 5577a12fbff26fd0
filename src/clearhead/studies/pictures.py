"""Draw the pictures of studies with matplotlib (pip install "clearhead[plot]").

content = draw_picture(result); plot_spread(axes, [1, 2, 3], rows, label="loss", color=COLORS[0])
"""

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np

from clearhead.errors import ClearheadError
from clearhead.studies.study import StudyResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Figure  # the studies import it from here
else:  # matplotlib is an extra, so it is imported only to draw
    Axes = Figure = Any

# Distinguishable also without color vision (Okabe & Ito 2008), the darker ones first.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#555555", "#000000")
_PIXELS_PER_INCH = 120


def check_can_draw() -> None:
    """Raise ClearheadError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ClearheadError('the picture of a study needs matplotlib; run: pip install "clearhead[plot]"') from None


def draw_picture(result: StudyResult) -> bytes:
    """Return the picture of a result as the content of a PNG file."""
    check_can_draw()
    from matplotlib import figure as matplotlib_figure

    figure = matplotlib_figure.Figure(figsize=result.study.figure_size, layout="constrained")
    result.study.draw(figure, result.measurements)
    content = BytesIO()
    figure.savefig(content, format="png", dpi=_PIXELS_PER_INCH)
    return content.getvalue()


def plot_spread(
    axes: Axes,
    x: Sequence[float],
    rows: Sequence[Sequence[float]],
    *,
    label: str,
    color: str,
    linestyle: str = "-",
    linewidth: float = 1.5,
    marker: str = "",
) -> None:
    """Draw a line through the means over seeds, one row each, and a band from their minimum to their maximum."""
    values = np.array(rows, dtype=float)
    style: dict[str, Any] = {"linestyle": linestyle, "linewidth": linewidth, "marker": marker, "markersize": 4}
    axes.plot(x, values.mean(axis=0), color=color, label=label, **style)
    axes.fill_between(x, values.min(axis=0), values.max(axis=0), color=color, alpha=0.2, linewidth=0)


def bar_spread(
    axes: Axes, names: Sequence[str], groups: Mapping[str, Sequence[Sequence[float]]], digits: int = 2
) -> None:
    """Draw groups of bars: for each group and name the mean over seeds, with a line from minimum to maximum."""
    width = 0.8 / len(groups)
    for number, (label, rows) in enumerate(groups.items()):
        values = np.array(rows, dtype=float)  # (names, seeds)
        means = values.mean(axis=1)
        x = np.arange(len(names)) + (number - (len(groups) - 1) / 2) * width
        spread = np.stack((means - values.min(axis=1), values.max(axis=1) - means))
        bars = axes.bar(x, means, width, yerr=spread, color=COLORS[number], label=label, error_kw={"linewidth": 1})
        axes.bar_label(bars, fmt=f"%.{digits}f", padding=2, fontsize=8)
    axes.set_xticks(range(len(names)), names)


def plot_roofline(axes: Axes, peak_flops: float, bytes_per_second: float, intensities: Mapping[str, float]) -> None:
    """Draw the limit that arithmetic and memory set to a device, and on it operations by their FLOPs per byte.

    Operations with almost the same intensity share a point and a line of the legend.
    """
    ends = [min(intensities.values()) / 3, peak_flops / bytes_per_second, max(intensities.values()) * 3]
    axes.plot(ends, [min(peak_flops, bytes_per_second * x) / 1e12 for x in ends], "k-", label="limit of the device")
    points: dict[str, list[str]] = {}
    for name, intensity in intensities.items():
        points.setdefault(f"{intensity:.0e}", []).append(name)
    for color, names in zip(COLORS, points.values(), strict=False):
        x = float(np.mean([intensities[name] for name in names]))
        y = min(peak_flops, bytes_per_second * x) / 1e12
        axes.plot(x, y, "o", color=color, markersize=9, label="\n".join(names))


def finish_axes(
    axes: Axes,
    *,
    title: str,
    x: str = "",
    y: str = "",
    xscale: str | None = None,
    yscale: str | None = None,
    ylim: tuple[float, float | None] | None = None,
    ticks: Sequence[int] | None = None,
    legend: bool = True,
) -> None:
    """Set title, labels, scales, a light grid and the legend of a plot.

    ticks: numbers to label on the x axis, instead of those that matplotlib chooses.
    """
    # Setting a scale, even the same one, removes the names of bars.
    settings = {"xscale": xscale, "yscale": yscale, "ylim": ylim}
    axes.set(xlabel=x, ylabel=y, **{name: value for name, value in settings.items() if value is not None})
    if ticks is not None:
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.set_xticks([], minor=True)
    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        if axis.get_scale() == "log" and ticks is None and high < 20 * low:  # the powers of 10 would be too few labels
            _label_short_log_axis(axis, low, high)
    axes.set_title(title, fontsize=11, loc="left")
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(fontsize=8, frameon=False)


def _label_short_log_axis(axis: Any, low: float, high: float) -> None:
    """Label round numbers of a logarithmic axis that is not much longer than a decade."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    axis.set_major_locator(MaxNLocator(5) if high < 3 * low else LogLocator(subs=(1, 2, 3, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:,.6g}")
