"""Blocks as the structures of the C++ kernels (cpu_kernels/structures.py).

    structures = LayerStructures(); layer = structures.layer(lower_block(block))

Norms and biases are copied to float32. The structures hold addresses: `structures` must live as long as they do.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from clearhead.architecture import QueryTemperature
from clearhead.backends.cpu_kernels import (
    ACTIVATION_CODES,
    NORM_CODES,
    PLACEMENT_CODES,
    ActivationStruct,
    Heads,
    LatentStruct,
    LayerStruct,
    MatrixStruct,
    MixtureStruct,
    NormStruct,
    describe_matrix,
    describe_parts,
)
from clearhead.backends.lowering import LoweredAttention, LoweredBlock
from clearhead.backends.lowering_feed_forward import LoweredActivation, LoweredMixture
from clearhead.backends.lowering_latent import LoweredLatent
from clearhead.backends.lowering_norms import NormSettings, lower_norm
from clearhead.backends.lowering_projections import PackedParts, Projection

_ATTENTION, CROSS_ATTENTION, FEED_FORWARD = range(3)  # branches of a layer, in the order of LayerStruct.norms


class LayerStructures:
    """The structures of layers, and what they point to."""

    def __init__(self) -> None:
        self.referenced: list[Any] = []  # keeps alive what the structures point to

    def layer(self, block: LoweredBlock) -> LayerStruct:
        """Return the structure of a block, which points to its weights."""
        layer = LayerStruct(PLACEMENT_CODES[block.placement], branch_scale=block.branch_scale)
        layer.heads = self.heads(block.attention)
        if block.latent is not None:
            latent = self.latent(block.latent)
            layer.latent, layer.heads.head_width = ctypes.addressof(latent), block.latent.absorbed_width
            layer.heads.rotary_pairs = 0  # queries and keys are rotated before
            self.referenced.append(latent)
        layer.query_key_value = self.matrix(block.query_key_value)
        layer.attention_output = self.matrix(block.attention_output)
        if isinstance(block.feed_forward, LoweredMixture):
            mixture = self.mixture(block.feed_forward)
            layer.mixture = ctypes.addressof(mixture)
            self.referenced.append(mixture)
        else:
            dense = block.feed_forward
            layer.gated, layer.activation = dense.gated, _activation_struct(dense.activation)
            layer.gate_and_up, layer.down = self.matrix(dense.gate_and_up), self.matrix(dense.down)
        residuals = {_ATTENTION: block.attention_residual, FEED_FORWARD: block.feed_forward_residual}
        if block.cross_attention is not None:
            layer.has_cross_attention = 1
            layer.cross_heads = self.heads(block.cross_attention.attention)
            layer.cross_query = self.matrix(block.cross_attention.query)
            layer.cross_output = self.matrix(block.cross_attention.output)
            residuals[CROSS_ATTENTION] = block.cross_attention.residual
        for branch, residual in residuals.items():
            layer.norms[branch] = self.norm(residual.norm)
            layer.branch_norms[branch] = self.norm(residual.branch_norm)
        return layer

    def heads(self, attention: LoweredAttention) -> Heads:
        """Return the structure of an attention layer: the sizes of its heads, its rotation and its norms."""
        config, norms = attention.config, attention.head_norms
        heads = Heads(
            config.num_heads,
            config.num_kv_heads,
            config.head_width,
            attention.rotary_pairs,
            attention.interleaved,
            attention.scale,
            norm_after_rotation=norms.after_rotation,
            is_joint=norms.scope == "joint",
            clip=config.clip or 0,
            softcap=config.softcap or 0,
            caps_last=isinstance(config.temperature, QueryTemperature),
            sinks=None if attention.sinks is None else self.address_of(attention.sinks.detach().float()),
        )
        query, key = self.norm_settings(norms.query), self.norm_settings(norms.key)
        if norms.scope == "shared":
            heads.query_norm, heads.key_norm = query, key
        else:
            heads.row_query_norm, heads.row_key_norm = query, key
        return heads

    def norm(self, module: nn.Module) -> NormStruct:
        """Return the structure of a norm, with float32 copies of its weight and bias; NO_NORM for an identity."""
        return self.norm_settings(lower_norm(module))

    def norm_settings(self, norm: NormSettings | None) -> NormStruct:
        """Return the structure of a norm's settings; NO_NORM for None."""
        if norm is None:
            return NormStruct()
        weight = norm.weight.detach().float()
        weight_address = self.address_of(1 + weight if norm.unit_offset else weight)
        bias_address = None if norm.bias is None else self.address_of(norm.bias.detach().float())
        return NormStruct(NORM_CODES[norm.kind], norm.epsilon, weight_address, bias_address)

    def matrix(self, projection: Projection) -> MatrixStruct:
        """Return the structure of a weight matrix and its bias, and keep both alive."""
        bias, weight = None if projection.bias is None else projection.bias.float(), projection.weight
        self.referenced += [bias, weight]
        if not isinstance(weight, PackedParts):
            return describe_matrix(weight, bias)
        sizes = [part.shape[0] for part in weight.parts]
        matrix, parts = describe_parts(weight.parts, [None] * len(sizes) if bias is None else list(bias.split(sizes)))
        self.referenced.append(parts)
        return matrix

    def address_of(self, tensor: Tensor) -> int:
        """Return the address of a tensor's values and keep the tensor alive."""
        self.referenced.append(tensor.contiguous())
        return self.referenced[-1].data_ptr()

    def latent(self, latent: LoweredLatent) -> LatentStruct:
        """Return the structure of latent attention."""
        config = latent.config
        struct = LatentStruct(
            config.num_heads,
            config.latent_rank,
            config.plain_width,
            config.value_width,
            config.rotary_width // 2,
            config.rope.pairing == "interleaved",
            latent.query_up is not None,
            self.norm_settings(latent.query_norm),
            self.norm_settings(latent.latent_norm),
            to_key=self.matrices(latent.to_key),
            to_value=self.matrices(latent.to_value),
        )
        if latent.query_up is not None:
            struct.query_up = self.matrix(latent.query_up)
        return struct

    def mixture(self, mixture: LoweredMixture) -> MixtureStruct:
        """Return the structure of a mixture of experts: its router, its experts and the shared expert."""
        config, router, groups = mixture.config, mixture.config.router, mixture.config.router.groups
        struct = MixtureStruct(
            config.num_experts,
            config.num_chosen,
            uses_sigmoid=router.score == "sigmoid",
            weighs_input=router.weighs == "input",
            renormalizes=router.renormalize_epsilon is not None,
            gated=bool(mixture.gate),
            softcap=router.softcap or 0,
            renormalize_epsilon=router.renormalize_epsilon or 0,
            scale=router.scale,
            divisor=config.divisor,
            router=self.matrix(mixture.router),
            activation=_activation_struct(mixture.activation),
        )
        if mixture.selection_bias is not None:
            struct.selection_bias = self.address_of(mixture.selection_bias)
        if groups is not None:
            struct.num_groups, struct.num_kept = groups.num_groups, groups.num_kept
            struct.sums_top2 = groups.scored_by == "top2_sum"
        struct.gate, struct.up, struct.down = map(self.matrices, (mixture.gate, mixture.up, mixture.down))
        if (shared := mixture.shared) is not None:
            struct.has_shared, struct.shared_gated = 1, shared.gated
            struct.shared_activation = _activation_struct(shared.activation)
            struct.shared_gate_and_up, struct.shared_down = self.matrix(shared.gate_and_up), self.matrix(shared.down)
        if mixture.shared_gate is not None:
            struct.has_shared_gate, struct.shared_gate = 1, self.matrix(mixture.shared_gate)
        return struct

    def matrices(self, projections: Sequence[Projection]) -> int:
        """Return the address of an array with the structures of several weight matrices."""
        array = (MatrixStruct * len(projections))(*map(self.matrix, projections))
        self.referenced.append(array)
        return ctypes.addressof(array)


def _activation_struct(activation: LoweredActivation) -> ActivationStruct:
    """Return the structure of an activation with its numbers."""
    struct = ActivationStruct(ACTIVATION_CODES[activation.name])
    if activation.clamp is not None:
        struct.limit, struct.up_offset = activation.clamp.limit, activation.clamp.up_offset
    if (xielu := activation.xielu) is not None:
        struct.positive, struct.negative = (float(number) for number in xielu.factors())
        struct.beta, struct.epsilon = float(xielu.beta), float(xielu.epsilon)
    return struct
