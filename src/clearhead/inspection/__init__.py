"""Looking inside: a trace of one forward on the fast path, what can be read off it, and pictures of it.

    model.trace("The cat sat").attention(layer=3, head=0)

tracing, record, recurrent   ways to a trace: of a text, of what is generated, of a row in training, of the baseline
trace, replay, heads, saved  what a trace keeps, and what it computes again when asked
lens, readings, attribution  what each depth would say; entropy, induction, rollout; who wrote the logit
ablation, patching, effect, sites   change one part, and see the next token change
views, labels, colours       what a picture shows: matrices, texts, colours
heatmap, picture             in the terminal; as PNG
page, document, assets       as one HTML file that reaches nothing outside itself
output                       a trace as a file, on the terminal, in a notebook or as data
worked, book                 the worked examples of the book
"""

from clearhead.inspection.book import (
    book_data,
    book_page,
    print_book,
)
from clearhead.inspection.page import (
    HeadSelection,
)
from clearhead.inspection.trace import (
    Trace,
)
from clearhead.inspection.tracing import (
    trace_text,
)
from clearhead.inspection.views import (
    Lens,
)

__all__ = [
    "HeadSelection",
    "Lens",
    "Trace",
    "book_data",
    "book_page",
    "output",
    "print_book",
    "trace_text",
]
