"""The recorded data of a trace: what one forward pass read, its residual streams, and optionally its heads.

record = load_record(path, network=None); record.num_layers_of("decoder"), record.residuals["decoder"][0].shape
"""

from dataclasses import dataclass, field
from typing import cast

from torch import Tensor

from clearhead.architecture import Layer, ModelConfig, Stack
from clearhead.errors import unknown_name
from clearhead.inspection.attention_heads import AttentionHeads, check_index
from clearhead.inspection.recording import StackInputs

_MAX_HEADING = 80  # characters


@dataclass(frozen=True)
class TraceRecord:
    """The recorded data of a trace, and lookups in its config.

    Layers and positions count from 0, or from the end if negative. `stack` is "encoder" or "decoder"; None means the
    decoder, or the encoder of an encoder-only model.
    """

    config: ModelConfig
    tokens: list[int]
    token_texts: list[str]
    residuals: dict[str, dict[int, Tensor]]  # by stack and depth: (T, D) before that layer; num_layers: after the last
    source_tokens: list[int] | None = None
    source_texts: list[str] | None = None
    heads: dict[str, list[AttentionHeads]] = field(default_factory=dict)  # by stack or "cross"; empty: not kept
    inputs: dict[str, StackInputs] = field(default_factory=dict)  # by stack

    @property
    def heading(self) -> str:
        """The beginning of the traced text, for headings."""
        text = "".join(self.token_texts)
        if len(text) <= _MAX_HEADING:
            return text
        start = text[: _MAX_HEADING - 1]
        whole_words = start.rpartition(" ")[0]  # some languages write no spaces
        return f"{whole_words if len(whole_words) > _MAX_HEADING // 2 else start}…"

    @property
    def size(self) -> str:
        """The number of layers and tokens as text."""
        source = "" if self.source_tokens is None else f" after {len(self.source_tokens)} source tokens"
        return f"{self.num_layers} layers, {len(self.tokens)} tokens{source}"

    @property
    def num_layers(self) -> int:
        """Number of layers of the decoder, or of the encoder of an encoder-only model."""
        return self.num_layers_of(None)

    def num_layers_of(self, stack: str | None) -> int:
        """Return the number of layers of a stack."""
        return len(self.stack_config(stack).layers)

    def num_heads(self, layer: int = 0, stack: str | None = None) -> int:
        """Return the number of attention heads of a layer."""
        return self.layer_config(layer, stack).attention.num_heads

    def layer_config(self, layer: int, stack: str | None = None) -> Layer:
        """Return the config of a layer."""
        name, layer = self.resolve_layer(layer, stack)
        return self.stack_config(name).layers[layer]

    def stack_config(self, stack: str | None) -> Stack:
        """Return the config of a stack."""
        return cast(Stack, getattr(self.config, self.resolve_stack(stack)))

    def resolve_layer(self, layer: int, stack: str | None) -> tuple[str, int]:
        """Return the name of the stack and the index of the layer from 0, after checking both."""
        name = self.resolve_stack(stack)
        return name, check_index("layer", layer, self.num_layers_of(name))

    def resolve_position(self, position: int) -> int:
        """Return a token position from 0, after checking it."""
        return check_index("position", position, len(self.tokens))

    def resolve_stack(self, stack: str | None) -> str:
        """Return the name of a stack, after checking it; None selects the decoder, or the only stack."""
        if stack is None:
            return "encoder" if self.config.decoder is None else "decoder"
        if stack not in self.residuals:
            raise unknown_name("stack", stack, self.residuals)
        return stack
