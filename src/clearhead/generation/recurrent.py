"""Greedy decoding with the recurrent baseline, which carries its state from token to token.

answers = translate(network, sources, start_id=1, stop_ids={2}, max_new_tokens=64)
"""

from collections.abc import Collection, Sequence

import torch

from clearhead.errors import ClearheadError
from clearhead.generation.prompts import pad_right
from clearhead.model import RecurrentTranslator


@torch.inference_mode()
def translate(
    network: RecurrentTranslator,
    sources: Sequence[Sequence[int]],
    *,
    start_id: int,
    stop_ids: Collection[int],
    max_new_tokens: int,
) -> list[list[int]]:
    """Return the tokens of each answer, its stop token included; every step takes the most likely token."""
    if not sources:
        return []
    if not all(sources):
        raise ClearheadError("the prompt is empty; give at least one token")
    tokens, mask = pad_right(sources, network.head.weight.device)
    encoder_output = network.encode(tokens, mask)
    state, token = network.initial_state(encoder_output), tokens.new_full((len(sources),), start_id)
    answers: list[list[int]] = [[] for _ in sources]
    unfinished = set(range(len(sources)))
    for _ in range(max_new_tokens):
        logits, state = network.step(token, state, encoder_output)
        token = logits.argmax(dim=-1)
        new_tokens = token.tolist()
        for index in unfinished:
            answers[index].append(new_tokens[index])
        unfinished = {index for index in unfinished if new_tokens[index] not in stop_ids}
        if not unfinished:
            break
    return answers
