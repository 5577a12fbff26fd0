"""The tokens of one window.

    tokens = decode_window(network, encoder_output, prompt, rules, max_new_tokens=224)

The decoder continues a prompt of special tokens; with beams, as generation/beam.py does for any text.
"""

from collections.abc import Sequence

import torch

from clearhead.cache import KeyValueCache, forward_step
from clearhead.generation import BeamRules, beam_search
from clearhead.model import EncoderOutput, Transformer
from clearhead.options import BeamOptions
from clearhead.sampling import check_finite
from clearhead.transcription.rules import TokenRules


def decode_window(
    network: Transformer,
    encoder_output: EncoderOutput,
    prompt: Sequence[int],
    rules: TokenRules,
    max_new_tokens: int,
    num_beams: int | None = None,
) -> list[int]:
    """Return the tokens that follow the prompt, without the token that ends the text."""
    end = rules.speech.end_id
    if num_beams is None:
        tokens = _decode_greedily(network, encoder_output, prompt, rules, max_new_tokens)
    else:
        options = BeamOptions(num_beams=num_beams, max_new_tokens=max_new_tokens, stop_ids=[end])
        beams = beam_search(network, [prompt], options, encoder_output, BeamRules(adjust=rules.apply))
        tokens = beams[0][0].tokens
    return tokens[:-1] if tokens and tokens[-1] == end else tokens


@torch.inference_mode()
def _decode_greedily(
    network: Transformer, encoder_output: EncoderOutput, prompt: Sequence[int], rules: TokenRules, max_new_tokens: int
) -> list[int]:
    """Return the most likely token of each step, the one that ends the text included."""
    cache, tokens = KeyValueCache(network.config), list[int]()
    newest = list(prompt)
    while len(tokens) < max_new_tokens:
        inputs = torch.tensor([newest], device=network.device)
        logits = forward_step(network, inputs, cache, encoder_output=encoder_output).float()
        best = rules.apply(logits, [tokens]).argmax(dim=-1)
        check_finite(logits, best)
        newest = best.tolist()
        tokens += newest
        if newest[0] == rules.speech.end_id:
            break
    return tokens
