"""From a prompt to new tokens.

    rows = [TokenSequence(prompt_ids, SamplingOptions(max_new_tokens=64))]; list(decode(network, rows)); rows[0].tokens

The loop is decode.py; how a token is chosen is sampling.py; what may be asked is options.py. speaker.py stands around
them all: prompts as people write them, and what became of them.
"""

from clearhead.generation.beam import (
    BeamOptions,
    beam_search,
)
from clearhead.generation.decode import (
    TokenSequence,
    check,
    decode,
    pad_left,
    prefill,
)
from clearhead.generation.prompts import (
    Prompt,
    check_tokens,
    encode_sources,
    explain_out_of_memory,
    pad_right,
    require_tokenizer,
    token_ids,
)
from clearhead.generation.recurrent import (
    translate,
)
from clearhead.generation.result import (
    Generation,
    Stream,
)
from clearhead.generation.score import (
    Score,
    check_scores,
    score,
)
from clearhead.generation.speculative import (
    Draft,
    Speculation,
    Tally,
    decode_speculatively,
)
from clearhead.generation.text_generator import (
    OTHERS,
    TextGenerator,
)
from clearhead.generation.transcript import (
    Transcript,
)

__all__ = [
    "OTHERS",
    "BeamOptions",
    "Draft",
    "Generation",
    "Prompt",
    "Score",
    "Speculation",
    "Stream",
    "Tally",
    "TextGenerator",
    "TokenSequence",
    "Transcript",
    "beam_search",
    "check",
    "check_scores",
    "check_tokens",
    "decode",
    "decode_speculatively",
    "encode_sources",
    "explain_out_of_memory",
    "pad_left",
    "pad_right",
    "prefill",
    "require_tokenizer",
    "score",
    "token_ids",
    "translate",
]
