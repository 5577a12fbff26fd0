"""Write one HTML file that embeds its styles, script, data and arrays, and loads nothing from outside.

    arrays = EmbeddedArrays(); html = html_document(title, body, styles=css, data=arrays.add(weights), arrays=arrays)

No text from a model or its tokenizer becomes markup: data is stored as JSON with `<` escaped, and the script displays
it as text. The content security policy lets the browser run only the script and styles of this file, by their hashes.
"""

import base64
import hashlib
import html
import json
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

_LITTLE_ENDIAN = {torch.float32: "<f4", torch.int32: "<i4", torch.uint8: "u1"}


class EmbeddedArrays:
    """Tensors to embed in a page, each in an element of its own that the script decodes on first use."""

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def add(self, tensor: Tensor) -> dict[str, Any]:
        """Add a tensor and return the reference to it: `{"array": 0, "type": "float32", "shape": [2, 2]}`."""
        array = tensor.detach().cpu().contiguous().numpy().astype(_LITTLE_ENDIAN[tensor.dtype])
        self.encoded.append(base64.b64encode(array.tobytes()).decode("ascii"))
        dtype = str(tensor.dtype).removeprefix("torch.")
        return {"array": len(self.encoded) - 1, "type": dtype, "shape": list(tensor.shape)}


def read_asset(name: str) -> str:
    """Return the text of a file in inspection/assets."""
    return files("clearhead.inspection").joinpath("assets", name).read_text(encoding="utf-8")


def html_document(
    title: str, body: str, *, styles: str, script: str = "", data: Any = None, arrays: EmbeddedArrays | None = None
) -> str:
    """Return a complete HTML document.

    `body`, `styles` and `script` are trusted and inserted unchanged; `title` and `data` are escaped.
    """
    policy = (
        f"default-src 'none'; style-src {_hash_source(styles)}; script-src {_hash_source(script)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    encoded = arrays.encoded if arrays is not None else []
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
        *(f'<script type="text/plain" id="array-{number}">{text}</script>' for number, text in enumerate(encoded)),
    ]
    if data is not None:
        parts.append(f'<script type="application/json" id="data">{script_json(data)}</script>')
    if script:
        parts.append(f"<script>{script}</script>")
    return "\n".join([*parts, "</body>", "</html>", ""])


def script_json(data: Any) -> str:
    """Return JSON that cannot end the script element around it: `</script>` and `<!--` both need a `<`."""
    return json.dumps(data, ensure_ascii=True, allow_nan=False).replace("<", "\\u003c")


def _hash_source(text: str) -> str:
    """Return a content security policy source that allows exactly this inline text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}'"


def sandboxed_frame(page: str, height_pixels: int) -> str:
    """Return an iframe for a notebook that runs the page's scripts but has no access to the surrounding page."""
    return (
        f'<iframe srcdoc="{html.escape(page)}" sandbox="allow-scripts" title="Clearhead trace" '
        f'style="width:100%;height:{height_pixels}px;border:0"></iframe>'
    )
