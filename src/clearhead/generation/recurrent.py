"""The recurrent baseline's answers, each step its likeliest token; state and memory are all it carries.

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
    """The tokens of each answer, its stop token included."""
    if not sources:
        return []
    if not all(sources):
        raise ClearheadError("the prompt is empty; it takes at least one token")
    tokens, mask = pad_right(sources, network.head.weight.device)
    encoder_output = network.encode(tokens, mask)
    state, token = network.start(encoder_output), tokens.new_full((len(sources),), start_id)
    answers: list[list[int]] = [[] for _ in sources]
    speaking = set(range(len(sources)))
    for _ in range(max_new_tokens):
        logits, state = network.step(token, state, encoder_output)
        token = logits.argmax(dim=-1)
        chosen = token.tolist()
        for number in speaking:
            answers[number].append(chosen[number])
        speaking = {number for number in speaking if chosen[number] not in stop_ids}
        if not speaking:
            break
    return answers
