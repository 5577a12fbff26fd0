"""Texts to vectors: encode them, run the network, pool the hidden states.

    vectors = embed_texts(model, model.config, ["A cat sat."])   # (B, E)

A folder of the sentence-transformers library says how (`SentenceConfig`). Other models get the mean of the last hidden
states, scaled to length 1.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from clearhead.architecture import LearnedPositions, ModelConfig, SentenceConfig, check_tokens
from clearhead.checkpoint import ModelParts
from clearhead.errors import ClearheadError
from clearhead.generation import Prompt, encode_prompt, explain_out_of_memory, pad_right, require_tokenizer
from clearhead.model import SentencePooler
from clearhead.tokenization import Tokenizer, encode_pair

_DEFAULT = SentencePooler(SentenceConfig())


@torch.no_grad()
def embed_texts(
    model: ModelParts,
    config: ModelConfig,
    texts: str | Sequence[Prompt],
    prompt_name: str | None = None,
    prompt: str | None = None,
) -> Tensor:
    """Return one vector per text (B, E)."""
    if not isinstance(texts, Iterable):
        raise ClearheadError(f"the texts are {texts!r}; give one text or a list of them")
    if prompt is not None and prompt_name is not None:
        raise ClearheadError("prompt and prompt_name exclude each other; give only one of them")
    pooler = model.sentence or _DEFAULT
    before = pooler.config.prompt(prompt_name) if prompt is None else prompt
    sequences = [_encode(model, config, text, before) for text in ([texts] if isinstance(texts, str) else texts)]
    if not sequences:
        raise ClearheadError("there is no text to embed; give at least one")
    stack = config.encoder or config.output_stack
    for tokens in sequences:
        check_tokens(tokens, stack)
    batch, mask = pad_right(sequences, model.network.device)
    with explain_out_of_memory():
        if config.is_encoder_decoder:
            hidden = model.network.encode(batch, mask).states
        else:
            hidden = model.network.hidden_states(batch, mask)
    needs_length = before and not pooler.config.pooling.include_prompt
    num_prompt_tokens = _count_prompt_tokens(require_tokenizer(model.tokenizer), before) if needs_length else 0
    vectors: Tensor = pooler(hidden, mask, num_prompt_tokens)
    return vectors


def _encode(model: ModelParts, config: ModelConfig, text: Prompt, prompt: str) -> list[int]:
    """Return the token ids of a text after the prompt; ids that are given stay as they are."""
    if model.sentence is None or not isinstance(text, str):
        return encode_prompt(prompt + text if isinstance(text, str) else text, model.tokenizer)
    sentence, stack = model.sentence.config, config.encoder or config.output_stack
    text = (prompt + text).strip()  # as the sentence-transformers library does
    positions = stack.token_embedding.positions
    limits = [positions.num_positions] if isinstance(positions, LearnedPositions) else []
    limits += [sentence.max_tokens] if sentence.max_tokens is not None else []
    tokenizer = require_tokenizer(model.tokenizer)
    return encode_pair(tokenizer, text.lower() if sentence.lower_case else text, None, min(limits, default=None)).ids


def _count_prompt_tokens(tokenizer: Tokenizer, prompt: str) -> int:
    """Return the number of tokens of a prompt, with a special token at its start but without one at its end."""
    ids = tokenizer.encode(prompt.strip())
    return len(ids) - (bool(ids) and ids[-1] in tokenizer.special_ids)
