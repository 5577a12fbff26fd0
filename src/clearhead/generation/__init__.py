"""Generate text: from prompts to new tokens, texts, streams and scores.

    sequences = [TokenSequence(prompt_ids, SamplingOptions(max_new_tokens=64))]; list(decode(network, sequences))

text_generator        TextGenerator: prompts and options in, generated texts out
prompts               encode and pad prompts; run the encoder; explain out-of-memory errors
sequences             TokenSequence: one sequence of a batch
decoding              decode: the readable loop with a cache
plain                 the same without a cache; tests compare every other loop with it
engine_decoding       the same loop for many sequences at once, in the engine
cuda_graph            the same loop on an NVIDIA GPU, each step in one CUDA graph
speculative           the same text from drafts that the network checks several tokens at a time
beam                  beam search
text_output           from tokens to text; stop_strings ends it
result                Generation and Stream
scoring               log-probabilities of a given text
recurrent             greedy decoding with the recurrent baseline
"""

from clearhead.generation.beam import BeamRules, beam_search
from clearhead.generation.decoding import decode, prefill, rotation_depends_on_length
from clearhead.generation.prompts import (
    Prompt,
    encode_prompt,
    encode_sources,
    explain_out_of_memory,
    pad_left,
    pad_right,
    require_tokenizer,
)
from clearhead.generation.recurrent import translate
from clearhead.generation.result import Generation, Stream
from clearhead.generation.scoring import Score, check_can_score, score
from clearhead.generation.sequences import TokenSequence
from clearhead.generation.speculative import Draft, Speculation, SpeculationStats, decode_speculatively
from clearhead.generation.text_generator import TextGenerator
from clearhead.generation.text_output import TextOutput

__all__ = [
    "BeamRules",
    "Draft",
    "Generation",
    "Prompt",
    "Score",
    "Speculation",
    "SpeculationStats",
    "Stream",
    "TextGenerator",
    "TextOutput",
    "TokenSequence",
    "beam_search",
    "check_can_score",
    "decode",
    "decode_speculatively",
    "encode_prompt",
    "encode_sources",
    "explain_out_of_memory",
    "pad_left",
    "pad_right",
    "prefill",
    "require_tokenizer",
    "rotation_depends_on_length",
    "score",
    "translate",
]
