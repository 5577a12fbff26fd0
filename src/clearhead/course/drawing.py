"""Small pictures of the course: line charts as SVG, and matrices as PNG images.

    svg = chart_svg(Chart("growth", [1, 2, 4], {"n²": [1, 4, 16]}, x_label="n"))

The colors are classes of course.css, so that a chart follows the light and the dark theme.
"""

import base64
import html
import math
import struct
import zlib
from collections.abc import Sequence

from torch import Tensor

from clearhead.course.parts import Chart

_WIDTH, _HEIGHT = 360, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 34
_POSITIVE, _NEGATIVE, _ZERO = (11, 95, 165), (194, 65, 12), (255, 255, 255)
_PIXELS = 4  # of a matrix entry, in each direction


def chart_svg(chart: Chart) -> str:
    """Return a line chart with ticks and a legend below it."""
    xs = _scaled(chart.x, chart.log_x)
    lines = {name: _scaled(values, chart.log_y) for name, values in chart.lines.items()}
    every = [value for values in lines.values() for value in values]
    x_range, y_range = (min(xs), max(xs)), (min(every), max(every))

    def place(x: float, y: float) -> str:
        across = _LEFT + _share(x, x_range) * (_WIDTH - _LEFT - _RIGHT)
        down = _HEIGHT - _BOTTOM - _share(y, y_range) * (_HEIGHT - _TOP - _BOTTOM)
        return f"{across:.1f},{down:.1f}"

    parts = []
    for number, values in enumerate(lines.values()):
        points = " ".join(place(x, y) for x, y in zip(xs, values, strict=True))
        parts.append(f'<polyline class="line line-{number}" points="{points}"/>')
    parts += _ticks(chart, x_range, y_range)
    legend = "".join(f'<li class="key key-{n}">{html.escape(name)}</li>' for n, name in enumerate(lines))
    label = f"{chart.name}: {', '.join(chart.lines)} over {chart.x_label}"
    caption = f"{chart.name}, both axes logarithmic" if chart.log_x and chart.log_y else chart.name
    return (
        f'<figure class="chart"><figcaption>{html.escape(caption)}</figcaption>\n'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(label)}">\n'
        + "\n".join(parts)
        + f'\n</svg>\n<ul class="legend">{legend}</ul></figure>'
    )


def _scaled(values: Sequence[float], log: bool) -> list[float]:
    return [math.log10(value) if log else value for value in values]


def _share(value: float, interval: tuple[float, float]) -> float:
    low, high = interval
    return 0.5 if low == high else (value - low) / (high - low)


def _ticks(chart: Chart, x_range: tuple[float, float], y_range: tuple[float, float]) -> list[str]:
    """Return the axes, with the smallest and the largest value of each."""
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    ends_x = [_number(value, chart.log_x) for value in x_range]
    ends_y = [_number(value, chart.log_y) for value in y_range]
    return [
        f'<path class="axis" d="M{_LEFT},{_TOP}V{bottom}H{right}"/>',
        f'<text x="{_LEFT}" y="{bottom + 14}">{ends_x[0]}</text>',
        f'<text x="{right}" y="{bottom + 14}" text-anchor="end">{ends_x[1]}</text>',
        f'<text x="{(_LEFT + right) / 2}" y="{bottom + 28}" text-anchor="middle">{html.escape(chart.x_label)}</text>',
        f'<text x="{_LEFT - 6}" y="{bottom}" text-anchor="end">{ends_y[0]}</text>',
        f'<text x="{_LEFT - 6}" y="{_TOP + 10}" text-anchor="end">{ends_y[1]}</text>',
    ]


def _number(value: float, log: bool) -> str:
    value = 10**value if log else value
    text = f"{value:,.0f}" if 999.5 <= value < 999_999.5 else f"{value:.3g}"
    return text.replace("e+0", "e").replace("e+", "e").replace("-", "−")


def matrix_png(values: Tensor) -> bytes:
    """Return a picture of a matrix with entries from -1 to 1: blue is positive, orange negative, white zero."""
    rows = []
    for row in values.tolist():
        pixels = b"".join(bytes(_blend(value)) * _PIXELS for value in row)
        rows += [b"\0" + pixels] * _PIXELS  # every row of a PNG starts with its filter, here none
    header = struct.pack(">IIBBBBB", values.shape[1] * _PIXELS, values.shape[0] * _PIXELS, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"".join(rows), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, content) for kind, content in chunks)


def _blend(value: float) -> tuple[int, ...]:
    end = _POSITIVE if value > 0 else _NEGATIVE
    return tuple(round(zero + (full - zero) * min(abs(value), 1.0)) for zero, full in zip(_ZERO, end, strict=True))


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def image(png: bytes, description: str) -> str:
    """Return an embedded picture."""
    content = base64.b64encode(png).decode("ascii")
    return f'<img src="data:image/png;base64,{content}" alt="{html.escape(description)}">'
