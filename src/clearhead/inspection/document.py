"""Write one HTML file that embeds its styles, script, data and arrays, and loads nothing from outside.

    arrays = EmbeddedArrays(); html = html_document(title, body, styles=css, data=arrays.add(weights), arrays=arrays)

No text from a model or its tokenizer becomes markup: data is stored as JSON with `<` escaped, and the script displays
it as text. The content security policy lets the browser run only the script and styles of this file, by their hashes.
"""

import base64
import hashlib
import html
import json
import zlib
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

_LITTLE_ENDIAN = {torch.float32: "<f4", torch.int32: "<i4", torch.uint16: "<u2", torch.uint8: "u1"}
_ALIGNMENT = 4  # bytes: a typed array of a script starts at a multiple of the size of its numbers


class EmbeddedArrays:
    """Tensors to embed in a page: one block of bytes, compressed with deflate and written in base64."""

    def __init__(self) -> None:
        self._compressor = zlib.compressobj(9)
        self._compressed: list[bytes] = []
        self._num_bytes = 0

    def add(self, tensor: Tensor) -> dict[str, Any]:
        """Add a tensor and return the reference to it: `{"offset": 0, "type": "float32", "shape": [2, 2]}`."""
        content = tensor.detach().cpu().contiguous().numpy().astype(_LITTLE_ENDIAN[tensor.dtype]).tobytes()
        dtype = str(tensor.dtype).removeprefix("torch.")
        reference = {"offset": self._num_bytes, "type": dtype, "shape": list(tensor.shape)}
        content += bytes(-len(content) % _ALIGNMENT)
        self._compressed.append(self._compressor.compress(content))
        self._num_bytes += len(content)
        return reference

    def finish(self) -> str:
        """Return all arrays as base64; none can be added afterwards."""
        return base64.b64encode(b"".join([*self._compressed, self._compressor.flush()])).decode("ascii")


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
    ]
    if arrays is not None:
        parts.append(f'<script type="text/plain" id="arrays">{arrays.finish()}</script>')
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
