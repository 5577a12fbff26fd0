"""The decode loop: read the prompts once, then generate one token per sequence and step, with a cache (book E2).

    sequences = [TokenSequence(prompt_ids, SamplingOptions(max_new_tokens=64))]
    for _ in decode(network, sequences): print(sequences[0].tokens[-1])

1 The network reads the prompts, padded on the left to one length; every layer caches its keys and values.
2 The logits after the last token of each sequence give its next token.
3 The network reads that token alone: its key and value join the cache, and its query attends to all of them.
4 Finished sequences leave the batch, together with their part of the cache.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.architecture import Causal, LongRopeScaling, Rope, Stack, remaining_positions
from clearhead.cache import KeyValueCache, forward_step
from clearhead.generation.prompts import encode_sources, pad_left
from clearhead.generation.sequences import TokenSequence, check_sequences
from clearhead.model import EncoderOutput, Transformer
from clearhead.sampling import (
    SamplingParameters,
    TokenCounts,
    check_finite,
    next_tokens,
    sampling_device,
    token_logprobs,
)

PREFILL_CHUNK = 2048  # tokens; 8,192 through windows of 512 take a sixth of the memory of all at once


def decode(
    network: Transformer,
    sequences: Sequence[TokenSequence],
    *,
    encoder_output: EncoderOutput | None = None,
    cache: KeyValueCache | None = None,
) -> Iterator[None]:
    """Check the sequences and return an iterator that adds one token to every unfinished one per iteration.

    encoder_output: one source per sequence; None encodes the sources of the sequences. cache: the keys and values of
    their `cached_tokens`; None starts with an empty one.
    """
    check_sequences(sequences, network)
    return decode_steps(network, sequences, encoder_output, cache or KeyValueCache(network.config))


@torch.inference_mode()
def decode_steps(
    network: Transformer,
    sequences: Sequence[TokenSequence],
    encoder_output: EncoderOutput | None,
    cache: KeyValueCache,
) -> Iterator[None]:
    """Yield once per step, after adding a token to every unfinished sequence. `decode` has checked the arguments."""
    wanted = [index for index, sequence in enumerate(sequences) if sequence.options.max_new_tokens > 0]
    if not wanted:
        return
    if encoder_output is None and sequences[0].source:
        encoder_output = encode_sources(network, [sequence.source for sequence in sequences])
    active, cache, encoder_output = _select_sequences(sequences, wanted, cache, encoder_output)
    sampler = BatchSampler.create(network, active)
    prompts = [list(sequence.prompt) for sequence in active]
    limits = rotation_limits(network.config.output_stack)
    if _is_outdated(cache, active, limits):
        logits = read_again(network, [sequence.text for sequence in active], cache, encoder_output)
    elif encoder_output is None and cache.length == 0:
        logits, cache = _prefill_unique(network, prompts, cache)
    else:
        logits = prefill(network, prompts, cache, encoder_output)
    while True:
        tokens = sampler.sample(logits)
        for sequence, token in zip(active, tokens.tolist(), strict=True):
            num_read = len(sequence.cached_tokens) + len(sequence.prompt)
            sequence.append(token, remaining_positions(network.config.output_stack, num_read))
        yield
        unfinished = [index for index, sequence in enumerate(active) if not sequence.finished]
        if not unfinished:
            return
        if len(unfinished) < len(active):
            active, cache, encoder_output = _select_sequences(active, unfinished, cache, encoder_output)
            tokens = tokens[unfinished]
            sampler = BatchSampler.create(network, active)
        if any(sequence.length - 1 in limits for sequence in active):
            logits = read_again(network, [sequence.text for sequence in active], cache, encoder_output)
        else:
            logits = forward_step(network, tokens[:, None].to(network.device), cache, encoder_output=encoder_output)


def _select_sequences(
    sequences: Sequence[TokenSequence], indices: list[int], cache: KeyValueCache, encoder_output: EncoderOutput | None
) -> tuple[list[TokenSequence], KeyValueCache, EncoderOutput | None]:
    """Return these sequences with their part of the cache and the encoder output. Nothing is copied if all stay."""
    if len(indices) < len(sequences):
        rows = torch.tensor(indices, device=cache.device)
        cache = cache.select(rows)
        encoder_output = None if encoder_output is None else encoder_output.select(rows)
    return [sequences[index] for index in indices], cache, encoder_output


# --- reading the prompts


def prefill(
    network: Transformer,
    prompts: Sequence[list[int]],
    cache: KeyValueCache,
    encoder_output: EncoderOutput | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Read all prompts into the cache, `chunk` tokens at a time; return the logits after their last tokens (B, V)."""
    tokens, mask = pad_left(prompts, network.device)
    size = chunk or prefill_chunk_size(network.config.output_stack, tokens.shape[1], mask)
    for start in range(0, tokens.shape[1], size):
        chunk_mask = None if mask is None else mask[:, start : start + size]
        logits = forward_step(network, tokens[:, start : start + size], cache, chunk_mask, encoder_output)
    return logits


def _prefill_unique(
    network: Transformer, prompts: Sequence[list[int]], cache: KeyValueCache
) -> tuple[Tensor, KeyValueCache]:
    """Read each distinct prompt once, then copy its row of the cache for every prompt equal to it.

    Return the logits after the last token of each prompt (B, V) and the cache of all of them.
    """
    distinct = [list(prompt) for prompt in dict.fromkeys(map(tuple, prompts))]
    logits = prefill(network, distinct, cache)
    if len(distinct) == len(prompts):
        return logits, cache
    rows = torch.tensor([distinct.index(prompt) for prompt in prompts], device=logits.device)
    return logits[rows], cache.select(rows)


def prefill_chunk_size(stack: Stack, length: int, attention_mask: Tensor | None) -> int:
    """Return how many tokens of a prompt to read at a time.

    Plain causal attention needs no mask, so it reads the whole prompt. A mask for windows or padding grows with the
    square of the number of tokens.
    """
    needs_mask = attention_mask is not None or any(
        not isinstance(layer.attention.pattern, Causal) for layer in stack.layers
    )
    return length if not needs_mask or rotation_depends_on_length(stack) else PREFILL_CHUNK


def rotation_limits(stack: Stack) -> set[int]:
    """Return the lengths from which LongRoPE rotates all tokens of a text by other factors once it grows further.

    The keys cached until then are of no use, and the text must be read again, as transformers does.
    """
    positions = [layer.attention.position for layer in stack.layers]
    scalings = [position.scaling for position in positions if isinstance(position, Rope)]
    return {scaling.original_context for scaling in scalings if isinstance(scaling, LongRopeScaling)}


def _is_outdated(cache: KeyValueCache, sequences: Sequence[TokenSequence], limits: set[int]) -> bool:
    """Return whether a cache was written below a limit that the texts now exceed, or beyond one they do not reach."""
    return cache.length > 0 and any(
        len(sequence.cached_tokens) <= limit < sequence.length or sequence.length <= limit < cache.peak_length
        for sequence in sequences
        for limit in limits
    )


def read_again(
    network: Transformer, texts: Sequence[list[int]], cache: KeyValueCache, encoder_output: EncoderOutput | None = None
) -> Tensor:
    """Empty the cache, run these texts from their start, and return the logits after their last tokens (B, V)."""
    cache.truncate(0)
    return prefill(network, texts, cache, encoder_output)


def rotation_depends_on_length(stack: Stack) -> bool:
    """Return whether rotations scale with the length of the text, as with dynamic scaling and LongRoPE.

    The cached keys of a chunk are then rotated for the length up to that chunk, so a text must be read as a whole.
    """
    positions = [layer.attention.position for layer in stack.layers]
    return any(isinstance(position, Rope) and position.depends_on_length for position in positions)


# --- choosing tokens


@dataclass
class BatchSampler:
    """Sample the next token of every sequence of a batch. Create another one when the batch changes."""

    sequences: Sequence[TokenSequence]
    parameters: SamplingParameters
    counts: TokenCounts | None  # only if a sequence has a penalty
    steps: Tensor  # (B,) number of new tokens of each sequence

    @staticmethod
    def create(network: Transformer, sequences: Sequence[TokenSequence]) -> "BatchSampler":
        """Collect the options of the sequences, and their token counts if a penalty needs them."""
        device = sampling_device(network.device)
        vocab_size = network.config.vocab_size
        parameters = SamplingParameters.from_options([sequence.options for sequence in sequences], vocab_size, device)
        counts = None
        if parameters.needs_counts:
            prompts = [[*sequence.cached_tokens, *sequence.prompt] for sequence in sequences]
            new_tokens = [sequence.tokens for sequence in sequences]
            counts = TokenCounts.from_tokens(prompts, new_tokens, vocab_size, device)
        steps = torch.tensor([len(sequence.tokens) for sequence in sequences], device=device)
        return BatchSampler(sequences, parameters, counts, steps)

    def sample(self, logits: Tensor) -> Tensor:
        """Return the next tokens (B,) for logits (B, V), and record their log-probabilities where requested."""
        logits = logits.to(self.steps.device)
        tokens = next_tokens(logits, self.parameters, self.steps, self.counts)
        check_finite(logits, tokens)
        self.steps = self.steps + 1
        self.counts = None if self.counts is None else self.counts.add(tokens)
        for index, sequence in enumerate(self.sequences):
            if sequence.options.logprobs is not None:
                logprobs = token_logprobs(logits[index], tokens[index], sequence.options.logprobs)
                sequence.logprobs.append(logprobs)
        return tokens
