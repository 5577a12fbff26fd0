"""Show attention views in a notebook: the page in a sandboxed frame.

html = notebook_html(trace.attention_views(), title="The cat sat")
"""

from collections.abc import Sequence

from clearhead.inspection.document import sandboxed_frame
from clearhead.inspection.page import render_page
from clearhead.inspection.views import AttentionView

_MAX_COMPUTED_CELLS = 8_000_000  # computed for thumbnails: 170 tokens of SmolLM2, about a second
_MAX_CELLS = 2_500_000  # of full matrices: 5 MB in the notebook's file


def notebook_html(views: Sequence[AttentionView], title: str, subtitle: str = "") -> str | None:
    """Return the page in a sandboxed frame, or None if it would be slow or large."""
    sizes = [len(view.rows) * len(view.columns) for view in views]
    num_computed = sum(size * sum(view.num_heads) for size, view in zip(sizes, views, strict=True))
    if num_computed > _MAX_COMPUTED_CELLS or max(sizes) > _MAX_CELLS:
        return None
    return sandboxed_frame(render_page(views, title, subtitle, max_cells=_MAX_CELLS), height_pixels=860)
