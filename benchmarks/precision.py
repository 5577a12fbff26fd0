"""Measure the rounding error of float32 logits on real weights: ours and that of transformers, against float64.

    python benchmarks/precision.py smollm2 minilm

Both libraries compute with the same weights (`model.to_huggingface()`). The reference is transformers in float64, with
every cast to float32 inside it made a cast to float64, as the parity tests do.
"""

import sys
from copy import deepcopy

import torch
from torch import Tensor, nn

import clearhead
from clearhead.model import reference_attention
from tests.parity.harness import float32_as_float64

TEXT = """The Transformer follows this overall architecture using stacked self-attention and point-wise, fully connected
layers for both the encoder and decoder. The encoder maps an input sequence of symbol representations to a sequence of
continuous representations. Given these, the decoder then generates an output sequence of symbols one element at a time.
At each step the model is auto-regressive, consuming the previously generated symbols as additional input."""


def run(module: nn.Module, tokens: Tensor) -> Tensor:
    """Return the logits of a module of transformers, or its last hidden states."""
    output = module(input_ids=tokens)
    return output.logits if "logits" in output else output.last_hidden_state


@torch.no_grad()
def measure(name: str) -> str:
    """Return the errors of both libraries, with the fused attention kernel and without it."""
    model = clearhead.load(name, dtype="float32", fast=False)
    tokens = torch.tensor([model.encode(TEXT)])
    module = model.to_huggingface()
    outputs = {"clearhead, fused": model.network(tokens)}
    outputs["clearhead, step by step"] = model.network(tokens, kernel=reference_attention)
    for kernel, words in (("sdpa", "fused"), ("eager", "step by step")):
        module.set_attn_implementation(kernel)
        outputs[f"transformers, {words}"] = run(module, tokens)
    with float32_as_float64():
        wide = type(module)(deepcopy(module.config)).eval().double()  # tables, such as rotary frequencies, in float64
        wide.load_state_dict(module.double().state_dict())
        exact = run(wide, tokens)
    lines = [f"{name}: {tokens.shape[1]} tokens, absolute values up to {exact.abs().max():.1f}"]
    for library, output in outputs.items():
        error = (output.double() - exact).abs()
        lines.append(
            f"  {library:28}largest error {error.max():.1e}, root mean square {error.square().mean().sqrt():.1e}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    for each in sys.argv[1:] or ["smollm2", "minilm"]:
        print(measure(each))
