"""Run a network unchanged, with its fused kernel and compiled graph, and record its residual stream.

    recorder = RecordingTransformer(network); recorder.hidden_states(tokens); recorder.residuals["decoder"][0]

The network itself is not modified. Other threads can run it at the same time without being recorded.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from clearhead.model import EncoderOutput, Scoring, Transformer, fused_attention


@dataclass(frozen=True)
class StackInputs:
    """The inputs of one stack for a single sequence (LayerStack.forward). Trace files save them by these names."""

    tokens: Tensor  # (1, T)
    mask: Tensor | None = None
    positions: Tensor | None = None
    documents: Tensor | None = None
    token_types: Tensor | None = None


class RecordingTransformer(Transformer):
    """A transformer that shares all modules of `network` and records the residual stream of every forward pass.

    residuals: by stack and depth, the stream (B, T, D) before the layer of that index (num_layers: after the last
    layer), one tensor per forward pass. sparse: record only every √L-th depth, so that at most √L layers have to be
    recomputed to reach any other.
    """

    def __init__(self, network: Transformer, sparse: bool = False):
        nn.Module.__init__(self)
        self.config, self.training = network.config, network.training
        self.encoder, self.decoder = network.encoder, network.decoder
        self.head, self.pooler, self.classifier = network.head, network.pooler, None  # a trace ends at hidden states
        self.residuals: dict[str, dict[int, list[Tensor]]] = {}
        for name, stack in (("encoder", self.encoder), ("decoder", self.decoder)):
            if stack is not None:
                num_layers = len(stack.layers)
                step = math.ceil(math.sqrt(num_layers)) if sparse else 1
                self.residuals[name] = {depth: [] for depth in (*range(0, num_layers, step), num_layers)}

    def hidden_states(self, *inputs: Any, **options: Any) -> Tensor:
        """Return the hidden states as `Transformer.hidden_states` does, and record the stream of the output stack."""
        return super().hidden_states(
            *inputs, **options, residuals=self.residuals["encoder" if self.decoder is None else "decoder"]
        )

    def encode(self, *inputs: Any, **options: Any) -> EncoderOutput:
        """Return the encoder output as `Transformer.encode` does, and record the encoder's stream."""
        return super().encode(*inputs, **options, residuals=self.residuals["encoder"])


@contextmanager
def evaluation_mode(network: nn.Module) -> Iterator[None]:
    """Disable dropout inside the block, and restore the training mode of every module afterwards."""
    training = [module for module in network.modules() if module.training]
    network.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def run_network(network: Transformer, inputs: StackInputs, source: StackInputs | None = None) -> Tensor:
    """Return the last hidden states (1, T, D) of the decoder, or of the encoder of an encoder-only model."""
    encoder_output = None if source is None else network.encode(source.tokens, source.mask, kernel=_pytorch_kernel)
    return network.hidden_states(
        inputs.tokens,
        inputs.mask,
        inputs.positions,
        token_types=inputs.token_types,
        documents=inputs.documents,
        encoder_output=encoder_output,
        kernel=_pytorch_kernel,
    )


def _pytorch_kernel(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """Call `fused_attention` under another name, which an accelerated stack does not replace by its own kernels.

    Layers are recomputed later with PyTorch's kernel, and must give bit-equal results.
    """
    return fused_attention(q, k, v, scoring)
