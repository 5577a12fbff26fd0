"""Small networks for the tests of backends, and the logits of a prompt and single steps after it."""

from dataclasses import replace

import torch

from clearhead.architecture import LayerNorm, LearnedPositions, SinusoidalPositions
from clearhead.cache import KeyValueCache
from clearhead.families import preset
from clearhead.model import Transformer
from tests.model.toys import CONTEXT, redraw
from tests.toy_presets import shrink


def toy_network(name: str, dtype: torch.dtype = torch.float32) -> Transformer:
    """Return a preset at toy size with weights from a fixed seed."""
    torch.manual_seed(0)
    network = Transformer(shrink(preset(name)))
    redraw(network)
    return network.to(dtype).eval()


@torch.no_grad()
def logits_of(network, tokens, mask=None, encoder_output=None, prompt_length=5):
    """Return the logits after the prompt and after every later token (B, T, V), and the cache."""
    cache, steps = KeyValueCache(network.config), []
    ranges = [(0, prompt_length), *((start, start + 1) for start in range(prompt_length, tokens.shape[1]))]
    for start, end in ranges:
        step_mask = None if mask is None else mask[:, start:end]
        hidden = network.hidden_states(tokens[:, start:end], step_mask, encoder_output=encoder_output, cache=cache)
        cache.advance()
        steps.append(network.compute_logits(hidden[:, -1]))
    return torch.stack(steps, dim=1).float(), cache


# --- networks that the CUDA graph supports: heads of width 16, two layers

GRAPH_NETWORKS = ("llama-3.2-1b", "gpt2", "opt", "minimal", "qwen3-8b", "mistral-7b", "gemma-3-1b")


def graph_network(name: str, device: str = "cpu") -> Transformer:
    """Return two layers of a preset, of OPT, or of a network without biases, final norm and learned positions."""
    config = with_attention(shrink(preset("gpt2" if name in ("opt", "minimal") else name)), head_width=16)
    stack = config.decoder
    if name == "opt":
        positions = LearnedPositions(num_positions=CONTEXT, offset=2)
        stack = change_stack(stack, positions, stack.layers[0].norm, stack.final_norm, "relu")
    if name == "minimal":
        stack = change_stack(stack, SinusoidalPositions(), LayerNorm(epsilon=1e-5, bias=False), None, "gelu")
    network = Transformer(replace(config, decoder=replace(stack, layers=stack.layers[:2])))
    redraw(network)
    return network.to(device).eval()


def change_stack(stack, positions, norm, final_norm, activation):
    feed_forward = replace(stack.layers[0].feed_forward, activation=activation)
    layers = tuple(replace(layer, norm=norm, feed_forward=feed_forward) for layer in stack.layers)
    return replace(stack, embedding=replace(stack.embedding, positions=positions), layers=layers, final_norm=final_norm)


def with_attention(config, **changes):
    """Return a decoder-only config with other settings in the attention of every layer."""
    layers = [replace(layer, attention=replace(layer.attention, **changes)) for layer in config.decoder.layers]
    return replace(config, decoder=replace(config.decoder, layers=tuple(layers)))
