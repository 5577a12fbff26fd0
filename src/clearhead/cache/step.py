"""One step of inference: run new tokens through the network and add them to the cache.

    logits = forward_step(network, tokens, cache)   # (B, T) -> (B, V), after the last token

The network writes keys and values; `advance` makes them part of the past. The functions here do both, and every loop
that generates calls them.
"""

from torch import Tensor

from clearhead.cache.key_value_cache import KeyValueCache
from clearhead.cache.packed_cache import PackedCache
from clearhead.cache.paged_cache import PagedCache
from clearhead.model import AttentionKernel, EncoderOutput, Transformer, fused_attention


def forward_step(
    network: Transformer,
    tokens: Tensor,
    cache: KeyValueCache | PagedCache | PackedCache,
    attention_mask: Tensor | None = None,
    encoder_output: EncoderOutput | None = None,
    *,
    absorb: bool | None = None,
    last_only: bool = True,
) -> Tensor:
    """Run new tokens (B, T), advance the cache and return the logits after the last token (B, V).

    last_only=False returns the logits after every token (B, T, V). The other arguments are those of `forward_hidden`.
    """
    hidden = forward_hidden(network, tokens, cache, attention_mask, encoder_output, absorb=absorb)
    return network.compute_logits(hidden[:, -1] if last_only else hidden)


def forward_hidden(
    network: Transformer,
    tokens: Tensor,
    cache: KeyValueCache | PagedCache | PackedCache,
    attention_mask: Tensor | None = None,
    encoder_output: EncoderOutput | None = None,
    *,
    absorb: bool | None = None,
    kernel: AttentionKernel = fused_attention,
) -> Tensor:
    """Run new tokens (B, T), advance the cache and return the last hidden states (B, T, D).

    attention_mask (B, T): False marks padding.
    encoder_output: what the cross-attention of an encoder-decoder attends to.
    absorb: latent attention attends to the cached latents themselves. None: it does for a single token, for which that
    is cheaper than unfolding the keys and values of all past tokens.
    """
    if absorb is None:
        absorb = tokens.shape[1] == 1
    hidden = network.hidden_states(
        tokens, attention_mask, encoder_output=encoder_output, cache=cache, absorb=absorb, kernel=kernel
    )
    cache.advance()
    return hidden
