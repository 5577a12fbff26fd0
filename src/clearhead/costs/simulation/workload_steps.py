"""A workload as something to run: the same steps on a real device and on the meta device.

step = prepare(network, workload); step()      # once or many times: every call does the same work
"""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from clearhead.architecture import ModelConfig
from clearhead.backends import GraphDecoder, why_no_cuda_graph
from clearhead.cache import KeyValueCache
from clearhead.costs.formulas.workload import Workload
from clearhead.model import AttentionKernel, EncoderOutput, Transformer, fused_attention

Step = Callable[[], None]


def build(workload: Workload, device: torch.device | str) -> Transformer:
    with torch.device(device):
        network = Transformer(workload.config)
    network.to(getattr(torch, workload.dtype))
    return network.train() if workload.phase == "train" else network.eval().requires_grad_(False)


def prepare(network: Transformer, workload: Workload, kernel: AttentionKernel = fused_attention) -> Step:
    match workload.phase:
        case "train":
            return training(network, workload, kernel)
        case "prefill":
            return prefilling(network, workload, kernel)
        case "decode" if in_graph(workload) and network.device.type == "cuda":
            return decoding_in_graph(network, workload)
        case "decode":
            return decoding(network, workload, kernel)


def some_tokens(network: Transformer, rows: int, length: int) -> Tensor:
    """Any that both sides of the model know."""
    config = network.config
    sizes = [stack.embedding.vocab_size for stack in (config.encoder, config.decoder) if stack]
    device = next(network.parameters()).device
    return torch.arange(rows * length, device=device).view(rows, length) % min(sizes)


def training(network: Transformer, workload: Workload, kernel: AttentionKernel) -> Step:
    """Forward, loss, backward; the optimizer is the caller's."""
    target = some_tokens(network, workload.batch, workload.context)
    inputs = [target]
    if workload.config.is_encoder_decoder:
        inputs = [some_tokens(network, workload.batch, workload.source), target]

    if workload.recompute:
        keep_inputs_only(network)

    @set_checkpoint_early_stop(False)  # every block whole, which is what is counted
    def step() -> None:
        network.zero_grad(set_to_none=True)
        out = network(*inputs, kernel=kernel).float()
        if workload.config.head is None:
            out.square().mean().backward()
        else:
            cross_entropy(out.flatten(0, 1), target.flatten()).backward()

    return step


def keep_inputs_only(network: Transformer) -> None:
    for stack in (network.encoder, network.decoder):
        for block in stack.layers if stack else ():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def prefilling(network: Transformer, workload: Workload, kernel: AttentionKernel) -> Step:
    config = workload.config
    length = workload.source if config.is_encoder_decoder else workload.context
    tokens = some_tokens(network, workload.batch, length)

    @torch.no_grad()
    def step() -> None:
        if config.is_encoder_decoder:
            network.precompute_cross_attention(network.encode(tokens, kernel=kernel))
        elif config.decoder is None:
            network(tokens, kernel=kernel)
        else:
            last_logits(network, tokens, kernel, KeyValueCache(config))

    return step


def decoding(network: Transformer, workload: Workload, kernel: AttentionKernel) -> Step:
    """The cache is filled once; a step that is not followed by `advance` may be run again."""
    cache, encoder_output = KeyValueCache(workload.config), None
    with torch.no_grad():
        if workload.config.is_encoder_decoder:
            source = some_tokens(network, workload.batch, workload.source)
            encoder_output = network.precompute_cross_attention(network.encode(source, kernel=kernel))
        if workload.context > 1:
            past = some_tokens(network, workload.batch, workload.context - 1)
            network.hidden_states(past, encoder_output=encoder_output, cache=cache, kernel=kernel)
            cache.advance()
    token = some_tokens(network, workload.batch, 1)

    @torch.no_grad()
    def step() -> None:
        last_logits(network, token, kernel, cache, encoder_output)

    return step


def in_graph(workload: Workload) -> bool:
    """Whether generation decodes this in the CUDA graph of backends/cuda/decoder.py."""
    decodes = workload.phase == "decode" and workload.device_type == "cuda" and workload.quant is None
    return decodes and fits_graph(workload.config)


@cache
def fits_graph(config: ModelConfig) -> bool:
    with torch.device("meta"):
        return why_no_cuda_graph(Transformer(config)) is None


def decoding_in_graph(network: Transformer, workload: Workload) -> Step:
    """The same place again and again; what the cache holds there makes no difference to the clock."""
    decoder = GraphDecoder(network, workload.batch, workload.context, greedy)
    decoder.position.fill_(workload.context - 1)
    decoder.start(some_tokens(network, workload.batch, 1)[:, 0])

    def step() -> None:
        decoder.position.fill_(workload.context - 1)
        decoder.next()

    return step


def greedy(logits: Tensor, steps: Tensor) -> Tensor:
    return logits.argmax(-1)


def last_logits(
    network: Transformer,
    tokens: Tensor,
    kernel: AttentionKernel,
    cache: KeyValueCache,
    encoder_output: EncoderOutput | None = None,
) -> Tensor:
    """As generation does it: a single token works on the latent itself, and only the last one has logits."""
    hidden = network.hidden_states(
        tokens, encoder_output=encoder_output, cache=cache, kernel=kernel, absorb=tokens.shape[1] == 1
    )
    return network.to_logits(hidden[:, -1])
