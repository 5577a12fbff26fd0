"""The Transformer: token ids in, logits out. Read this module first, then follow the list in model/__init__.py.

    network = Transformer(config); logits = network(tokens)                 # (B, T) -> (B, T, V)
    logits = network(source, target)                                        # encoder-decoder

One class covers decoders, encoders and encoder-decoders. The network keeps no state: every call computes its masks and
positions anew, and the attention kernel and the cache are arguments.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Unpack, cast, overload

import torch
from torch import Tensor, nn

from clearhead.architecture import AttentionPattern, ModelConfig, Stack
from clearhead.errors import ClearheadError
from clearhead.model.attend import AttentionKernel, fused_attention
from clearhead.model.attention import Attention
from clearhead.model.audio import AudioEmbeddingLayer, build_embedding
from clearhead.model.block import Block
from clearhead.model.classifier import ClassifierLayer
from clearhead.model.context import (
    AttentionContext,
    Cache,
    DecoderOptions,
    EncoderOutput,
    ForwardContext,
    StackOptions,
    build_relative_bias,
    make_contexts,
)
from clearhead.model.embedding import LogitHead, TokenEmbedding, check_shapes
from clearhead.model.initialize import initialize
from clearhead.model.masks import AttentionIndices, cross_attention_mask, resolve_positions
from clearhead.model.norms import build_norm


class LayerStack(nn.Module):
    """Embedding, blocks and final norm. The encoder and the decoder are both a LayerStack, with different masks."""

    def __init__(self, stack: Stack, config: ModelConfig, table: nn.Embedding | None = None):
        super().__init__()
        self.stack = stack
        self.width = config.width
        self.embedding = build_embedding(stack.embedding, config.width, config.dropout.embedding, table)
        self.layers = nn.ModuleList(Block(layer, config.width, config.dropout) for layer in stack.layers)
        if stack.shared_layers:
            self.layers = nn.ModuleList([self.layers[0]] * len(stack.layers))
        self.final_norm = build_norm(stack.final_norm, config.width) if stack.final_norm else nn.Identity()
        self.relative_bias = build_relative_bias(stack.layers, config.width)

    def forward(
        self,
        tokens: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        token_types: Tensor | None = None,
        documents: Tensor | None = None,
        encoder_output: EncoderOutput | None = None,
        cache: Cache | None = None,
        kernel: AttentionKernel = fused_attention,
        absorb: bool = False,
        residuals: Mapping[int, list[Tensor]] | None = None,
    ) -> Tensor:
        """Return the last hidden states (B, T, D).

        tokens: token ids (B, T), or mel bands (B, M, 2T) for an encoder that reads audio; it takes no masks.
        attention_mask: True or 1 for real tokens, False or 0 for padding (B, T). None: no padding.
        position_ids: position of each token (B or 1, T). None: its place among the real tokens of its sequence.
        token_types: segment of each token (B, T). None: all 0.
        documents: document number of each token (B, T); tokens attend only within their document. None: one document.
        encoder_output: what the cross-attention of a decoder attends to.
        cache: keys and values of the tokens before these. The new ones are written to it; the caller advances it.
        kernel: computes attention, such as `fused_attention` or `reference_attention`.
        absorb: latent attention attends to the latent vectors without unfolding them.
        residuals: receives the residual stream (B, T, D) before each listed layer; number L is after the last layer.
        """
        inputs = {"position_ids": position_ids, "token_types": token_types, "documents": documents}
        self.embedding.check_inputs(tokens, attention_mask=attention_mask, **inputs)
        self.check_encoder_output(encoder_output)
        places = self.embedding.places(tokens)
        positions, indices_for = _locate_tokens(places, attention_mask, position_ids, documents, cache)
        if tokens.device.type == "cpu" and not torch.compiler.is_compiling():  # elsewhere it would force a device sync
            self.embedding.check_ranges(tokens, positions, token_types)
        x = self.embedding(tokens, positions, token_types)
        forward = ForwardContext(indices_for, positions, self.width, x.dtype, kernel, absorb)
        contexts = make_contexts(self.stack.layers, forward, self.relative_bias)
        cross_context = None
        if encoder_output is not None:
            cross_mask = cross_attention_mask(
                encoder_output.mask, encoder_output.target_documents, encoder_output.source_documents
            )
            cross_context = AttentionContext(cross_mask, kernel, positions)
        residuals = residuals or {}
        for number, (layer, block) in enumerate(zip(self.stack.layers, self.layers, strict=True)):
            if number in residuals:
                residuals[number].append(x)
            context = contexts[layer.attention]
            if cache is not None:
                context = replace(context, write_cache=partial(cache.write, number))
            x = block(x, context, None if encoder_output is None else encoder_output.for_layer(number), cross_context)
        if len(self.layers) in residuals:
            residuals[len(self.layers)].append(x)
        return self.final_norm(x)

    @property
    def token_embedding(self) -> TokenEmbedding:
        """The embedding of a stack that reads tokens; raise ClearheadError if it reads audio."""
        if isinstance(self.embedding, AudioEmbeddingLayer):
            raise ClearheadError("the encoder of this model reads audio, not tokens; use transcribe")
        return self.embedding

    def check_encoder_output(self, encoder_output: EncoderOutput | None) -> None:
        """Raise ClearheadError if encoder_output is missing for cross-attention, or given without cross-attention."""
        has_cross_attention = self.stack.layers[0].cross_attention is not None
        if has_cross_attention and encoder_output is None:
            raise ClearheadError(
                "this decoder has cross-attention; it needs encoder_output from network.encode(source)"
            )
        if not has_cross_attention and encoder_output is not None:
            raise ClearheadError("this model has no cross-attention; leave out encoder_output")


def _locate_tokens(
    tokens: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    documents: Tensor | None,
    cache: Cache | None,
) -> tuple[Tensor, Callable[[AttentionPattern], AttentionIndices]]:
    """Return the positions (B or 1, T) of the tokens, and the attention indices for each attention pattern."""
    if cache is None:
        positions, indices = resolve_positions(tokens, attention_mask, position_ids, documents)
        return positions, lambda pattern: indices
    if position_ids is not None or documents is not None:
        raise ClearheadError(
            "with a cache, positions continue those of the cache; leave out position_ids and documents"
        )
    return cache.prepare(tokens, attention_mask), cache.attention_indices


class Transformer(nn.Module):
    """A decoder, an encoder, or both, with an optional output head and pooler."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.encoder = LayerStack(config.encoder, config) if config.encoder else None
        shared = self.encoder.token_embedding.tokens if self.encoder and config.share_embeddings else None
        self.decoder = LayerStack(config.decoder, config, shared) if config.decoder else None
        table_width = config.output_stack.token_embedding.width or config.width
        self.head = LogitHead(config.head, config.vocab_size, config.width, table_width) if config.head else None
        self.classifier = ClassifierLayer(config.classifier, config.width) if config.classifier else None
        self.pooler = nn.Linear(config.width, config.width) if config.pooler else None
        initialize(self, config)

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.parameters()).device

    @overload
    def forward(
        self,
        tokens: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **options: Unpack[DecoderOptions],
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        source: Tensor,
        target: Tensor,
        source_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
        cache: Cache | None = None,
        **options: Unpack[StackOptions],
    ) -> Tensor: ...

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        """Return logits (B, T, V); without a head, the scores of the classifier, or else hidden states (B, T, D).

        A decoder or an encoder takes tokens (the first signature), an encoder-decoder source and target (the second).
        LayerStack.forward describes the arguments.
        """
        if self.config.is_encoder_decoder:
            return self.encode_and_decode(*inputs, **options)
        hidden = self.hidden_states(*inputs, **options)
        if self.head is None and self.classifier is not None:
            return self.classify(hidden, inputs[1] if len(inputs) > 1 else options.get("attention_mask"))
        return self.compute_logits(hidden)

    def hidden_states(
        self,
        tokens: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **options: Unpack[DecoderOptions],
    ) -> Tensor:
        """Return the last hidden states (B, T, D) of the decoder, or of the encoder if there is no decoder.

        tokens: token ids (B, T).
        attention_mask: True or 1 for real tokens, False or 0 for padding (B, T). None: no padding.
        position_ids: position of each token (B or 1, T). None: its place among the real tokens of its sequence.
        options: token_types, documents, encoder_output, cache, kernel, absorb, residuals; see LayerStack.forward.
        """
        stack = self.decoder or self.encoder
        assert stack is not None
        return stack(tokens, attention_mask, position_ids, **options)

    def encode_and_decode(
        self,
        source: Tensor,
        target: Tensor,
        source_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
        cache: Cache | None = None,
        **options: Unpack[StackOptions],
    ) -> Tensor:
        """Encode source (B, S) and return the logits (B, T, V) of target (B, T). The cache is the decoder's."""
        encoder_output = self.encode(source, source_mask, **options)
        return self.decode(target, encoder_output, target_mask, cache=cache, **options)

    def encode(
        self, source: Tensor, source_mask: Tensor | None = None, **options: Unpack[StackOptions]
    ) -> EncoderOutput:
        """Run the encoder on source (B, S), or mel bands (B, M, 2S). source_mask (B, S): False marks padding."""
        if self.encoder is None:
            raise ClearheadError("this model has no encoder; call network(tokens)")
        self.encoder.embedding.check_inputs(source, source_mask=source_mask)
        return EncoderOutput(self.encoder(source, source_mask, **options), source_mask)

    def precompute_cross_attention(self, encoder_output: EncoderOutput) -> EncoderOutput:
        """Add the cross-attention keys and values of every layer, so that decoding steps do not recompute them."""
        assert self.decoder is not None
        context = AttentionContext(
            cross_attention_mask(encoder_output.mask),
            fused_attention,
            torch.zeros(1, 1, device=encoder_output.states.device),  # a placeholder: keys and values need no positions
        )
        layers = [cast(Attention, block.cross_attention) for block in self.decoder.layers]
        return replace(
            encoder_output,
            cross_keys_values=tuple(layer.keys_and_values(encoder_output.states, context) for layer in layers),
        )

    def decode(
        self,
        target: Tensor,
        encoder_output: EncoderOutput,
        target_mask: Tensor | None = None,
        cache: Cache | None = None,
        **options: Unpack[StackOptions],
    ) -> Tensor:
        """Return the logits (B, T, V) of target (B, T). Every layer attends to the last encoder states (book C3)."""
        if self.decoder is None or self.encoder is None:
            raise ClearheadError("decode needs an encoder-decoder model; call network(tokens)")
        check_shapes(target, target_mask=target_mask)
        hidden = self.hidden_states(target, target_mask, encoder_output=encoder_output, cache=cache, **options)
        return self.compute_logits(hidden)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Return the logits (..., V) of hidden states (..., D), or the hidden states if the model has no head."""
        if self.head is None:
            return hidden_states
        return self.head(hidden_states, self.token_table)

    @property
    def token_table(self) -> Tensor:
        """The token embeddings (V, D) of the output stack, which a tied head uses as its matrix."""
        stack = self.decoder or self.encoder
        assert stack is not None
        return stack.token_embedding.tokens.weight

    def pool(self, hidden_states: Tensor) -> Tensor:
        """Return one vector per sequence, computed from its first token: (B, T, D) -> (B, D)."""
        if self.pooler is None:
            raise ClearheadError("this model has no pooler; average its hidden states instead")
        return torch.tanh(self.pooler(hidden_states[:, 0]))

    def classify(self, hidden_states: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the scores of labels of each text (B, C), or of each token (B, T, C); mask (B, T) marks padding."""
        if self.classifier is None:
            raise ClearheadError("this model has no classification head; load one that was trained to classify")
        pooled = self.pool(hidden_states) if self.classifier.config.reads == "pooled" else None
        return self.classifier(hidden_states, mask, pooled)
