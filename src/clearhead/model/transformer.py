"""The table of contents: ids in, logits out. Read this first, then embedding, block, attention, attend.

    network = Transformer(config); logits = network(tokens)                 # (B, T) -> (B, T, V)
    logits = network(source, target)                                        # encoder-decoder

One class for three kinds: a decoder alone, an encoder alone, or both. The network keeps no state: masks and
positions are made anew in each call, and the attention kernel comes in as an argument.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from clearhead.architecture import AttentionPattern, ModelConfig, RelativeBuckets, Stack
from clearhead.errors import ClearheadError
from clearhead.model.attend import AttentionKernel, fused_attention
from clearhead.model.attention import Attention
from clearhead.model.block import Block
from clearhead.model.context import AttentionContext, Cache, ForwardContext, KeyValue, contexts_for
from clearhead.model.embedding import LogitHead, TokenEmbedding, blank_table
from clearhead.model.initialize import initialize
from clearhead.model.masks import Grid, cross_attention_mask, places
from clearhead.model.norms import build_norm


@dataclass(frozen=True)
class EncoderOutput:
    """What an encoder leaves for the decoder."""

    states: Tensor  # (B, S, D)
    mask: Tensor | None = None  # (B, S), None: no padding
    cross_keys_values: tuple[KeyValue, ...] | None = None  # keys and values of each layer's cross-attention, made once

    def of_layer(self, number: int) -> Tensor | KeyValue:
        return self.states if self.cross_keys_values is None else self.cross_keys_values[number]

    def select(self, rows: Tensor) -> "EncoderOutput":
        """These rows of the batch, in this order and as often as they are named."""
        cross_keys_values = None
        if self.cross_keys_values is not None:
            cross_keys_values = tuple((key[rows], value[rows]) for key, value in self.cross_keys_values)
        return EncoderOutput(self.states[rows], None if self.mask is None else self.mask[rows], cross_keys_values)

    @property
    def num_bytes(self) -> int:
        """Of the cross-attention's keys and values."""
        tensors = [tensor for pair in self.cross_keys_values or () for tensor in pair]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class LayerStack(nn.Module):
    """Embedding, blocks, last norm: encoder and decoder are this under other masks."""

    def __init__(self, stack: Stack, config: ModelConfig, table: nn.Embedding | None = None):
        super().__init__()
        self.stack, self.width = stack, config.width
        self.embedding = TokenEmbedding(stack.embedding, config.width, config.dropout.embedding, table)
        self.layers = nn.ModuleList(Block(layer, config.width, config.dropout) for layer in stack.layers)
        self.final_norm = build_norm(stack.final_norm, config.width) if stack.final_norm else nn.Identity()
        self.relative_bias = bucket_table(stack)

    def forward(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        *,
        token_types: Tensor | None = None,
        documents: Tensor | None = None,
        encoder_output: EncoderOutput | None = None,
        cache: Cache | None = None,
        kernel: AttentionKernel = fused_attention,
        absorb: bool = False,
        residuals: Mapping[int, list[Tensor]] | None = None,
    ) -> Tensor:
        """tokens, mask, positions, token_types, documents (B, T) -> hidden states (B, T, D).

        heard: takes the stream before the layers it names (their number: after the last).
        """
        check_shapes(tokens, mask=mask, position_ids=positions, token_types=token_types, documents=documents)
        has_cross_attention = self.stack.layers[0].cross_attention is not None
        if has_cross_attention != (encoder_output is not None):
            raise ClearheadError(f"this stack {'needs' if has_cross_attention else 'takes no'} memory of an encoder")
        grid: Callable[[AttentionPattern], Grid]
        if cache is not None:
            if positions is not None or documents is not None:
                raise ClearheadError("with a cache, positions follow from it: give neither position_ids nor documents")
            positions, grid = cache.begin(tokens, mask), cache.grid
        else:
            positions, whole = places(tokens, mask, positions, documents)
            grid = constant(whole)
        if tokens.device.type == "cpu" and not torch.compiler.is_compiling():  # elsewhere to look is to wait
            self.embedding.check(tokens, positions, token_types)
        x = self.embedding(tokens, positions, token_types)
        forward = ForwardContext(grid, positions, self.width, x.dtype, kernel, absorb)
        contexts = contexts_for(self.stack.layers, forward, self.relative_bias)
        cross_context = (
            None
            if encoder_output is None
            else AttentionContext(cross_attention_mask(encoder_output.mask), kernel, positions)
        )
        residuals = residuals or {}
        for number, (layer, block) in enumerate(zip(self.stack.layers, self.layers, strict=True)):
            if number in residuals:
                residuals[number].append(x)
            context = contexts[layer.attention]
            if cache is not None:
                context = replace(context, keep=partial(cache.write, number))
            x = block(x, context, None if encoder_output is None else encoder_output.of_layer(number), cross_context)
        if len(self.layers) in residuals:
            residuals[len(self.layers)].append(x)
        return self.final_norm(x)


def constant(grid: Grid) -> Callable[[AttentionPattern], Grid]:
    return lambda pattern: grid


def bucket_table(stack: Stack) -> nn.Embedding | None:
    """One for all layers (T5)."""
    for layer in stack.layers:
        if isinstance(layer.attention.position, RelativeBuckets):
            return blank_table(layer.attention.position.num_buckets, layer.attention.num_heads)
    return None


class Transformer(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.encoder = LayerStack(config.encoder, config) if config.encoder else None
        shared = self.encoder.embedding.tokens if self.encoder and config.share_embeddings else None
        self.decoder = LayerStack(config.decoder, config, shared) if config.decoder else None
        self.head = LogitHead(config.head, config.vocab_size, config.width) if config.head else None
        self.pooler = nn.Linear(config.width, config.width) if config.pooler else None
        initialize(self, config)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        """Logits (B, T, V); hidden states (B, T, D) where the model has no head.

        One stack: forward(tokens, attention_mask=None, position_ids=None, token_types=None, documents=None).
        Encoder-decoder: forward(source, target, source_mask=None, target_mask=None).
        Both take kernel= (attend.fused or attend.reference) and absorb= (latent attention on the latent itself),
        and with one stack cache=: past tokens, of which these are the next.
        """
        if self.config.is_encoder_decoder:
            return self.translate(*inputs, **options)
        return self.read(*inputs, **options)

    def read(
        self,
        tokens: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        return self.to_logits(self.hidden_states(tokens, attention_mask, position_ids, **options))

    def hidden_states(
        self,
        tokens: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Last hidden states (B, T, D), of the decoder where there are two. True or 1 in the mask: a real token."""
        stack = self.decoder or self.encoder
        assert stack is not None
        return stack(tokens, attention_mask, position_ids, **options)

    def translate(
        self,
        source: Tensor,
        target: Tensor,
        source_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
        cache: Cache | None = None,
        **options: Any,
    ) -> Tensor:
        encoder_output = self.encode(source, source_mask, **options)
        return self.decode(target, encoder_output, target_mask, cache=cache, **options)

    def encode(self, source: Tensor, source_mask: Tensor | None = None, **options: Any) -> EncoderOutput:
        if self.encoder is None:
            raise ClearheadError("this model has no encoder; call network(tokens)")
        return EncoderOutput(self.encoder(source, source_mask, **options), source_mask)

    def precompute_cross_attention(self, encoder_output: EncoderOutput) -> EncoderOutput:
        """The memory with every layer's cross-attention keys and values, so that decoding does not repeat them."""
        assert self.decoder is not None
        context = AttentionContext(
            cross_attention_mask(encoder_output.mask),
            fused_attention,
            torch.zeros(1, 1, device=encoder_output.states.device),
        )
        layers = [cast(Attention, block.cross_attention) for block in self.decoder.layers]
        return replace(
            encoder_output,
            cross_keys_values=tuple(layer.keys_and_values(encoder_output.states, context) for layer in layers),
        )

    def decode(
        self, target: Tensor, encoder_output: EncoderOutput, target_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Every decoder layer looks at the encoder's last output (book C3)."""
        if self.decoder is None or self.encoder is None:
            raise ClearheadError("this model does not decode from a memory; call network(tokens)")
        return self.to_logits(self.hidden_states(target, target_mask, encoder_output=encoder_output, **options))

    def to_logits(self, hidden_states: Tensor) -> Tensor:
        if self.head is None:
            return hidden_states
        return self.head(hidden_states, self.output_table)

    @property
    def output_table(self) -> Tensor:
        """The token table (V, D) that a tied head shares."""
        stack = self.decoder or self.encoder
        assert stack is not None
        return stack.embedding.tokens.weight

    def pool(self, hidden_states: Tensor) -> Tensor:
        """One vector per sequence from its first token: (B, T, D) -> (B, D)."""
        if self.pooler is None:
            raise ClearheadError("this model has no pooler; average its hidden states instead")
        return torch.tanh(self.pooler(hidden_states[:, 0]))


def check_shapes(tokens: Tensor, **others: Tensor | None) -> None:
    if tokens.ndim != 2 or tokens.numel() == 0:
        raise ClearheadError(f"tokens must be (batch, length) and not empty, not {tuple(tokens.shape)}")
    if tokens.dtype not in (torch.int64, torch.int32):
        raise ClearheadError(f"tokens must be whole numbers (int64 or int32), not {tokens.dtype}")
    for name, part in others.items():
        one_row_for_all = name == "position_ids" and part is not None and part.shape == (1, tokens.shape[1])
        if part is not None and part.shape != tokens.shape and not one_row_for_all:
            raise ClearheadError(f"{name} is {tuple(part.shape)}; it must be {tuple(tokens.shape)} as tokens are")
