"""How good a model is, in numbers that others report too.

    ask(clearhead.load("smollm2"), "hellaswag", store.get("evaluation-sets"), limit=100)

likelihood.py says how likely a model finds one text after another; perplexity.py and choices.py make their measures of
it, harness.py lends it to lm-evaluation-harness. answers.py compares what a model writes with what it should have.
"""

from clearhead.evaluation.answers import (
    pairs,
    translation,
)
from clearhead.evaluation.choices import (
    ask,
)
from clearhead.evaluation.perplexity import (
    bytes_scored,
    perplexity,
)
from clearhead.evaluation.result import (
    Result,
)

__all__ = [
    "Result",
    "ask",
    "bytes_scored",
    "pairs",
    "perplexity",
    "translation",
]
