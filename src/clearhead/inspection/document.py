"""One HTML file that holds all it needs and can reach nothing else: styles, script, data and arrays of numbers.

    arrays = Arrays(); html = document(title, body, styles=css, data={"weights": arrays.add(weights)}, arrays=arrays)

Nothing from a model or its tokenizer becomes markup: data stands in JSON whose `<` is escaped, and the script shows it
as text. The content security policy lets the browser run only the script and styles of this file, by their hashes.
"""

import base64
import hashlib
import html
import json
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

LITTLE_ENDIAN = {torch.float32: "<f4", torch.int32: "<i4", torch.uint8: "u1"}


class Arrays:
    """Tensors on their way into a page, each in an element of its own that is decoded when it is looked at."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def add(self, tensor: Tensor) -> dict[str, Any]:
        """What the data says in its place: `{"array": 0, "type": "float32", "shape": [2, 2]}`."""
        numbers = tensor.detach().cpu().contiguous().numpy().astype(LITTLE_ENDIAN[tensor.dtype])
        self.texts.append(base64.b64encode(numbers.tobytes()).decode("ascii"))
        kind = str(tensor.dtype).removeprefix("torch.")
        return {"array": len(self.texts) - 1, "type": kind, "shape": list(tensor.shape)}


def asset(name: str) -> str:
    return files("clearhead.inspection").joinpath("assets", name).read_text(encoding="utf-8")


def document(
    title: str, body: str, *, styles: str, script: str = "", data: Any = None, arrays: Arrays | None = None
) -> str:
    """`body`, `styles` and `script` are ours and stand as they are; `title` and `data` may come from anywhere."""
    policy = (
        f"default-src 'none'; style-src {fingerprint(styles)}; script-src {fingerprint(script)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    texts = arrays.texts if arrays is not None else []
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<link rel="icon" href="data:,">',
        f"<title>{html.escape(title)}</title>",
        f"<style>{styles}</style>",
        "</head>",
        f"<body>{body}",
        *(f'<script type="text/plain" id="array-{number}">{text}</script>' for number, text in enumerate(texts)),
    ]
    if data is not None:
        parts.append(f'<script type="application/json" id="data">{as_json(data)}</script>')
    if script:
        parts.append(f"<script>{script}</script>")
    return "\n".join([*parts, "</body>", "</html>", ""])


def as_json(data: Any) -> str:
    """JSON that cannot end the element it stands in: `</script>` and `<!--` both need a `<`."""
    return json.dumps(data, ensure_ascii=True, allow_nan=False).replace("<", "\\u003c")


def fingerprint(text: str) -> str:
    """A source of a content security policy: this very text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}'"


def framed(page: str, height_pixels: int) -> str:
    """A page inside another, as notebooks show it: with its scripts, without access to what surrounds it."""
    return (
        f'<iframe srcdoc="{html.escape(page)}" sandbox="allow-scripts" title="Clearhead trace" '
        f'style="width:100%;height:{height_pixels}px;border:0"></iframe>'
    )
