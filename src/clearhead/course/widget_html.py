"""Controls and first state of a widget as HTML. The script of the page changes it; without the script it stays.

body = widget_html("temperature", make_widgets()["temperature"])
"""

import html
from dataclasses import asdict
from typing import Any

from clearhead.course.widgets import Control, Widget
from clearhead.inspection import colors

_BAR_HEIGHT, _BAR_WIDTH = 120, 360
_CIRCLE = 100  # half of the width of the vectors' picture
_MAX_NUMBERED_BARS = 6


def widget_html(name: str, widget: Widget) -> str:
    """Return a widget with the controls of its frames."""
    controls = "\n".join(_control_html(name, number, control) for number, control in enumerate(widget.controls))
    picture = {"bars": _bars, "grid": _grid, "vectors": _vectors}[widget.kind](widget)
    note = html.escape(widget.frames[widget.start].note)
    return (
        f'<div class="widget" id="widget-{name}" role="group" aria-label="{html.escape(widget.title)}">\n'
        f'<div class="controls" hidden>\n{controls}\n</div>\n{picture}\n<output>{note}</output>\n</div>'
    )


def widget_data(widgets: dict[str, Widget]) -> dict[str, Any]:
    """Return all widgets as JSON data for the script, with the shade of every grid cell."""
    data = {}
    for name, widget in widgets.items():
        frames = [
            {"values": [[round(value, 9) for value in row] for row in frame.values], "note": frame.note}
            for frame in widget.frames
        ]
        data[name] = {
            "kind": widget.kind,
            "controls": [asdict(control) for control in widget.controls],
            "frames": frames,
            "numShades": colors.NUM_SHADES,
        }
    return data


def _control_html(name: str, number: int, control: Control) -> str:
    identity = f"{name}-{number}"
    label = f'<label for="{identity}">{html.escape(control.label)}</label>'
    if control.is_choice:
        options = "".join(
            f'<option value="{place}"{" selected" if place == control.start else ""}>{html.escape(stop)}</option>'
            for place, stop in enumerate(control.stops)
        )
        return f'<p>{label} <select id="{identity}">{options}</select></p>'
    return (
        f'<p>{label} <input type="range" id="{identity}" min="0" max="{len(control.stops) - 1}" step="1" '
        f'value="{control.start}" aria-valuetext="{html.escape(control.stops[control.start])}"> '
        f'<span class="stop">{html.escape(control.stops[control.start])}</span></p>'
    )


def _bars(widget: Widget) -> str:
    values = widget.frames[widget.start].values[0]
    step = _BAR_WIDTH / len(values)
    has_numbers = len(values) <= _MAX_NUMBERED_BARS
    parts = []
    for number, value in enumerate(values):
        left, height = step * (number + 0.1), value * _BAR_HEIGHT
        parts.append(
            f'<rect class="bar" x="{left:.1f}" width="{0.8 * step:.1f}" y="{20 + _BAR_HEIGHT - height:.2f}" '
            f'height="{height:.2f}"/>'
        )
        if has_numbers:
            center = step * (number + 0.5)
            parts.append(f'<text class="value" x="{center:.1f}" y="14" text-anchor="middle">{value:.4f}</text>')
            label = html.escape(widget.labels[number])
            parts.append(f'<text x="{center:.1f}" y="{_BAR_HEIGHT + 36}" text-anchor="middle">{label}</text>')
    height = _BAR_HEIGHT + (44 if has_numbers else 24)
    return _svg(f"0 0 {_BAR_WIDTH} {height}", f"{widget.title}: one bar for each weight", parts)


def _grid(widget: Widget) -> str:
    values = widget.frames[widget.start].values
    heads = "".join(f'<th scope="col">{label}</th>' for label in widget.labels)
    rows = []
    for label, row in zip(widget.labels, values, strict=True):
        cells = "".join(f'<td class="{colors.shade_class(value**0.5)}">{value:.3f}</td>' for value in row)
        rows.append(f'<tr><th scope="row">{label}</th>{cells}</tr>')
    return (
        f'<div class="scrollable" tabindex="0" role="region" aria-label="Weights">\n<table><thead><tr><td></td>{heads}'
        f"</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _vectors(widget: Widget) -> str:
    values = widget.frames[widget.start].values
    parts = [f'<circle class="axis" r="{0.9 * _CIRCLE:.0f}"/>']
    for number, (x, y) in enumerate(values):
        parts.append(
            f'<line class="line line-{number}" x1="0" y1="0" x2="{90 * x:.2f}" y2="{-90 * y:.2f}"/>'
            f'<circle class="tip tip-{number}" r="4" cx="{90 * x:.2f}" cy="{-90 * y:.2f}"/>'
        )
    legend = "".join(f'<li class="key key-{number}">{label}</li>' for number, label in enumerate(widget.labels))
    size = 2 * _CIRCLE
    svg = _svg(f"{-_CIRCLE} {-_CIRCLE} {size} {size}", f"{widget.title}: two arrows from the center", parts)
    return f'{svg}\n<ul class="legend">{legend}</ul>'


def _svg(view: str, label: str, parts: list[str]) -> str:
    content = "\n".join(parts)
    return f'<svg viewBox="{view}" role="img" aria-label="{html.escape(label)}">\n{content}\n</svg>'
