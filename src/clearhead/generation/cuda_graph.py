"""The decode loop on an NVIDIA GPU: the same tokens as decoding.py, with each step in one CUDA graph.

    if can_decode_in_graph(network, sequences, cache): steps = decode_in_graph(network, sequences, cache)

The graph starts the next two steps before the host reads the first of their tokens, so that the GPU never waits for
the host. Tokens generated beyond the end of a sequence are dropped.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from clearhead.architecture import remaining_positions
from clearhead.backends import AsyncTokens, GraphDecoder, triton_available, unsupported_network_reason
from clearhead.cache import ContiguousStore, KeyValueCache
from clearhead.generation.decoding import prefill_chunk_size
from clearhead.generation.sequences import TokenSequence, check_sequences
from clearhead.model import Transformer
from clearhead.sampling import SamplingParameters, check_finite, next_tokens

INITIAL_NEW_TOKENS = 1024  # most longer requests end before; if not, the capacity of the cache doubles


def can_decode_in_graph(
    network: Transformer, sequences: Sequence[TokenSequence], cache: KeyValueCache | None = None
) -> bool:
    """Return whether the graph supports this network, the options of all sequences and the cache."""
    if not triton_available(network.device) or unsupported_network_reason(network, "cuda"):
        return False
    if network.device.index not in (None, torch.cuda.current_device()):
        return False  # graphs are captured, and Triton's kernels are launched, on the current device
    return all(is_supported(sequence) for sequence in sequences) and is_cache_supported(network, sequences, cache)


def is_supported(sequence: TokenSequence) -> bool:
    """Return False if a sequence needs all earlier tokens (penalties), all logits (logprobs) or an encoder."""
    options = sequence.options
    penalties = options.repetition_penalty, options.presence_penalty, options.frequency_penalty
    return penalties == (1.0, 0.0, 0.0) and options.logprobs is None and not sequence.source


def is_cache_supported(network: Transformer, sequences: Sequence[TokenSequence], cache: KeyValueCache | None) -> bool:
    """Return whether there is no cache, or one of a single sequence (a chat) in the layout that the graph uses."""
    if cache is None:
        return not any(sequence.cached_tokens for sequence in sequences)
    parameter = next(network.parameters())
    tensors = [tensor for store in cache.stores for tensor in store.tensors().values()]
    same_layout = all((len(t), t.dtype, t.device) == (1, parameter.dtype, parameter.device) for t in tensors)
    contiguous = cache.attention_mask is None and all(isinstance(store, ContiguousStore) for store in cache.stores)
    one_sequence = len(sequences) == 1 and len(sequences[0].cached_tokens) == cache.length
    return same_layout and contiguous and one_sequence and cache.config == network.config


def decode_in_graph(
    network: Transformer, sequences: Sequence[TokenSequence], cache: KeyValueCache | None = None
) -> Iterator[None]:
    """Check the sequences and return an iterator that adds one token to every unfinished one per iteration.

    cache: the keys and values of the `cached_tokens` of a single sequence; the new tokens are added to it.
    """
    check_sequences(sequences, network)
    return _graph_steps(network, [each for each in sequences if each.options.max_new_tokens > 0], cache)


@torch.inference_mode()
def _graph_steps(
    network: Transformer, sequences: Sequence[TokenSequence], cache: KeyValueCache | None
) -> Iterator[None]:
    if not sequences:
        return
    options = [sequence.options for sequence in sequences]
    parameters = SamplingParameters.from_options(options, network.config.vocab_size, network.device)

    def choose(logits: Tensor, steps: Tensor) -> Tensor:
        return next_tokens(logits, parameters, steps)

    lengths = [len(sequence.cached_tokens) + len(sequence.prompt) for sequence in sequences]
    limits = [remaining_positions(network.config.output_stack, length) for length in lengths]
    num_new = max(min(each.max_new_tokens, limit) for each, limit in zip(options, limits, strict=True))
    # A finished sequence continues until the last one finishes, and two more steps are started meanwhile.
    length = max(lengths)
    capacity = length + min(num_new, INITIAL_NEW_TOKENS) + 2
    decoder = GraphDecoder(network, len(sequences), capacity, choose, cache)

    def start_step() -> AsyncTokens:
        nonlocal length
        if length == decoder.capacity:
            decoder.double_capacity()
        length += 1
        return AsyncTokens(decoder.replay_step())

    chunk = prefill_chunk_size(network.config.output_stack, length, None)
    logits = decoder.prefill([sequence.prompt for sequence in sequences], chunk)
    first = choose(logits, torch.zeros_like(decoder.num_generated))
    check_finite(logits, first)
    decoder.start(first)
    tokens, pending = first.tolist(), start_step()
    while True:
        following = start_step()
        for sequence, token, limit in zip(sequences, tokens, limits, strict=True):
            if not sequence.finished:
                sequence.append(token, limit)
        yield
        if all(sequence.finished for sequence in sequences):
            return
        tokens, pending = pending.result(), following
        if cache is not None:
            cache.advance_by(1)  # the token before these
