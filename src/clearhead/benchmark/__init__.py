"""Ours and the peers against one clock: the same prompt, greedily, in turns; what `clearhead bench` shows.

engine     what is measured: says each token of a text as soon as it knows it
ours       every weight format of this package; huggingface, llamacpp, ctranslate2: the peers
subject    the model and all that engines are made from
measure    rounds in which all take turns, medians over them
traffic    bytes that a token moves, and how fast this machine reads
report     the tables
"""

from clearhead.benchmark.ctranslate2 import (
    convert,
)
from clearhead.benchmark.line_up import (
    check_names,
    line_up,
)
from clearhead.benchmark.measure import (
    PAUSE_SECONDS,
    measure,
    measure_growth,
    num_steps,
)
from clearhead.benchmark.subject import (
    Subject,
    draw,
)
from clearhead.benchmark.traffic import (
    weights_held,
)

__all__ = [
    "PAUSE_SECONDS",
    "Subject",
    "check_names",
    "convert",
    "draw",
    "line_up",
    "measure",
    "measure_growth",
    "num_steps",
    "report",
    "weights_held",
]
