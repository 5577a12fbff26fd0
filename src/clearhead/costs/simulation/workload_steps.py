"""A workload as a step that can be run, on a real device or on the meta device.

    step = prepare_step(build_network(workload, "cpu"), workload); step()

Every call of a step does the same work.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from clearhead.architecture import AudioEmbedding, Embedding
from clearhead.backends import GraphDecoder, unsupported_reason
from clearhead.cache import KeyValueCache, forward_hidden
from clearhead.costs.formulas import Workload
from clearhead.model import AttentionKernel, EncoderOutput, Transformer, fused_attention

Step = Callable[[], None]


def build_network(workload: Workload, device: torch.device | str) -> Transformer:
    """Build the network of a workload with random weights, in training mode for training and else for inference."""
    with torch.device(device):
        network = Transformer(workload.config)
    network.to(getattr(torch, workload.dtype))
    return network.train() if workload.phase == "train" else network.eval().requires_grad_(False)


def prepare_step(network: Transformer, workload: Workload, kernel: AttentionKernel = fused_attention) -> Step:
    """Allocate the inputs and the cache of a workload and return the step that runs it."""
    match workload.phase:
        case "train":
            return _training_step(network, workload, kernel)
        case "prefill":
            return _prefill_step(network, workload, kernel)
        case "decode" if uses_cuda_graph(workload) and network.device.type == "cuda":
            return _graph_decode_step(network, workload)
        case "decode":
            return decode_step(network, workload, kernel)


def dummy_tokens(network: Transformer, batch: int, length: int) -> Tensor:
    """Return token ids (batch, length) that are in the vocabularies of both the encoder and the decoder."""
    config = network.config
    stacks = [stack for stack in (config.encoder, config.decoder) if stack]
    vocab_sizes = [stack.embedding.vocab_size for stack in stacks if isinstance(stack.embedding, Embedding)]
    device = next(network.parameters()).device
    return torch.arange(batch * length, device=device).view(batch, length) % min(vocab_sizes)


def _dummy_source(network: Transformer, workload: Workload) -> Tensor:
    """Return an input of the encoder of an encoder-decoder: token ids (batch, source), or mel bands of silence."""
    encoder = network.config.encoder
    if encoder is None or not isinstance(encoder.embedding, AudioEmbedding):
        return dummy_tokens(network, workload.batch, workload.source)
    frames, parameter = 2 * encoder.embedding.num_positions, next(network.parameters())
    return parameter.new_zeros(workload.batch, encoder.embedding.num_mel_bands, frames)


def _training_step(network: Transformer, workload: Workload, kernel: AttentionKernel) -> Step:
    """Return a step of forward, loss and backward, without an optimizer."""
    target = dummy_tokens(network, workload.batch, workload.context)
    inputs = [target]
    if workload.config.is_encoder_decoder:
        inputs = [_dummy_source(network, workload), target]
    if workload.recompute:
        _checkpoint_blocks(network)

    @set_checkpoint_early_stop(False)  # recompute every block completely, as the formulas count it
    def step() -> None:
        network.zero_grad(set_to_none=True)
        out = network(*inputs, kernel=kernel).float()
        if workload.config.head is None:
            out.square().mean().backward()
        else:
            cross_entropy(out.flatten(0, 1), target.flatten()).backward()

    return step


def _checkpoint_blocks(network: Transformer) -> None:
    """Apply activation checkpointing: each block stores its input only and runs its forward again in the backward."""
    for stack in (network.encoder, network.decoder):
        for block in stack.layers if stack else ():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def _prefill_step(network: Transformer, workload: Workload, kernel: AttentionKernel) -> Step:
    config = workload.config
    if config.is_encoder_decoder:
        tokens = _dummy_source(network, workload)
    else:
        tokens = dummy_tokens(network, workload.batch, workload.context)

    @torch.no_grad()
    def step() -> None:
        if config.is_encoder_decoder:
            network.precompute_cross_attention(network.encode(tokens, kernel=kernel))
        elif config.decoder is None:
            network(tokens, kernel=kernel)
        else:
            last_logits(network, tokens, kernel, KeyValueCache(config))

    return step


def decode_step(network: Transformer, workload: Workload, kernel: AttentionKernel = fused_attention) -> Step:
    """Fill a cache and return a step that decodes one token without a CUDA graph.

    The step does not call `cache.advance()`, so every run of it overwrites the same slot.
    """
    cache, encoder_output = KeyValueCache(workload.config), None
    with torch.no_grad():
        if workload.config.is_encoder_decoder:
            source = _dummy_source(network, workload)
            encoder_output = network.precompute_cross_attention(network.encode(source, kernel=kernel))
        if workload.context > 1:
            past = dummy_tokens(network, workload.batch, workload.context - 1)
            forward_hidden(network, past, cache, encoder_output=encoder_output, absorb=False, kernel=kernel)
    token = dummy_tokens(network, workload.batch, 1)

    @torch.no_grad()
    def step() -> None:
        last_logits(network, token, kernel, cache, encoder_output)

    return step


def last_logits(
    network: Transformer,
    tokens: Tensor,
    kernel: AttentionKernel,
    cache: KeyValueCache,
    encoder_output: EncoderOutput | None = None,
) -> Tensor:
    """Return the logits after the last token as cache/step.py computes them, but leave the cache as it is."""
    hidden = network.hidden_states(
        tokens, encoder_output=encoder_output, cache=cache, kernel=kernel, absorb=tokens.shape[1] == 1
    )
    return network.compute_logits(hidden[:, -1])


# --- in a CUDA graph


def uses_cuda_graph(workload: Workload) -> bool:
    """Return whether this workload is predicted and measured in the CUDA graph of backends/cuda/decoder.py."""
    if workload.phase != "decode" or workload.device_type != "cuda" or workload.is_packed:
        return False
    return workload.dtype != "float64" and unsupported_reason(workload.config, "cuda") is None


def _graph_decode_step(network: Transformer, workload: Workload) -> Step:
    """Return a step that always decodes the last position; the values in the cache do not affect the time."""
    decoder = GraphDecoder(network, workload.batch, workload.context, choose_greedily)
    decoder.position.fill_(workload.context - 1)
    decoder.start(dummy_tokens(network, workload.batch, 1)[:, 0])

    def step() -> None:
        decoder.position.fill_(workload.context - 1)
        decoder.replay_step()

    return step


def choose_greedily(logits: Tensor, num_generated: Tensor) -> Tensor:
    """Return the most likely token of each sequence, as the `choose` argument of GraphDecoder."""
    return logits.argmax(-1)
