"""A decoder's layers as the structures of the C++ kernels, and the call that runs new tokens through all of them.

    plan = Plan(stack); plan.run(x, positions, encoder_output, cache); plan.run_packed(x, packed_cache)

A plan is built once: weights are merged by lowering.py, norms and biases are copied to float32. Every call then sets
only what changes (attention_inputs.py, packed_inputs.py). `detector` checks whether the plan still matches the modules.
"""

from ctypes import byref
from typing import Any, cast

from torch import Tensor, nn

from clearhead.architecture import QueryTemperature
from clearhead.backends.cpu.attention_inputs import AttentionInputs
from clearhead.backends.cpu.change_detector import ChangeDetector
from clearhead.backends.cpu.packed_inputs import PackedInputs, RowInputs
from clearhead.backends.cpu_kernels import (
    ACTIVATION_CODES,
    NORM_CODES,
    PLACEMENT_CODES,
    ActivationStruct,
    Heads,
    LayerStruct,
    MatrixStruct,
    NormStruct,
    PackedBatchStruct,
    describe_matrix,
    describe_parts,
    kernels_support_prompts,
    load_kernel_library,
)
from clearhead.backends.lowering import (
    LoweredActivation,
    LoweredAttention,
    LoweredBlock,
    PackedParts,
    Projection,
    lower_block,
)
from clearhead.backends.lowering_norms import NormSettings, lower_norm
from clearhead.cache import KeyValueCache, PackedCache
from clearhead.model import Block, EncoderOutput, LayerStack

_ATTENTION, CROSS_ATTENTION, FEED_FORWARD = range(3)  # branches of a layer, in the order of LayerStruct.norms


class Plan:
    """The layers of a stack, ready for the kernels; valid as long as `detector.unchanged()`."""

    def __init__(self, stack: LayerStack):
        self.referenced: list[Any] = []  # keeps alive what the structures point to
        shared = stack.relative_bias
        blocks = [lower_block(cast(Block, block), keep_formats=True, shared_bias=shared) for block in stack.layers]
        self.final_norm = self.norm_struct(stack.final_norm)
        self.layers = (LayerStruct * len(blocks))(*(self.layer_struct(block) for block in blocks))
        self.inputs = AttentionInputs(
            [block.attention for block in blocks],
            [block.cross_attention.attention.config for block in blocks if block.cross_attention is not None],
            next(stack.layers.parameters()).dtype,
        )
        self.packed_inputs = PackedInputs(self.inputs.groups, self.inputs.dtype)
        self.row_inputs = RowInputs(self.inputs.groups, self.inputs.dtype)
        self.detector = ChangeDetector(stack)
        self.writer = object()  # becomes last_writer of the caches it writes; does not keep the plan alive

    def run(self, x: Tensor, positions: Tensor, encoder_output: EncoderOutput | None, cache: KeyValueCache) -> None:
        """Run x (B, T, D) through all layers and the final norm, in place; write keys and values to the cache.

        positions are (B or 1, T). If T > 1, every store of the cache must be contiguous.
        """
        batch, num_new = x.shape[:2]
        is_plain = encoder_output is None and cache.attention_mask is None and cache.is_contiguous
        if is_plain and kernels_support_prompts() and self.run_rows(x, cache):
            return
        referenced = self.inputs.prepare(cache, positions, batch)
        cross_views = None
        if encoder_output is not None and encoder_output.cross_keys_values is not None:
            referenced += self.inputs.prepare_cross_attention(encoder_output, batch)
            cross_views = self.inputs.cross_views
        kernels = load_kernel_library()
        assert kernels is not None
        kernels.clearhead_run_layers(
            self.layers,
            len(self.layers),
            self.inputs.views,
            cross_views,
            self.inputs.angles,
            byref(self.final_norm),
            x.data_ptr(),
            batch,
            num_new,
        )
        del referenced  # the structures pointed to these tensors until here

    def run_rows(self, x: Tensor, cache: KeyValueCache) -> bool:
        """Do the same for a contiguous cache without padding as for pages, in the same order of sums.

        Return False, without having done it, if the buffers of the cache are not such rows.
        """
        batch, num_new = x.shape[:2]
        self.inputs.bind(cache, batch, num_new)
        if not self.inputs.row_capacity:
            return False
        layout, referenced = self.row_inputs.prepare_rows(
            self.inputs.view_fields, cache.length, batch, num_new, self.inputs.row_capacity
        )
        self._call_packed(self.row_inputs, layout, x)
        del referenced  # the layout pointed to these arrays until here
        return True

    def run_packed(self, x: Tensor, cache: PackedCache) -> None:
        """Run packed tokens x (1, T, D) through all layers and the final norm, in place; write keys and values."""
        self._call_packed(self.packed_inputs, self.packed_inputs.prepare(cache), x)

    def _call_packed(self, inputs: PackedInputs, batch: PackedBatchStruct, x: Tensor) -> None:
        kernels = load_kernel_library()
        assert kernels is not None
        kernels.clearhead_run_packed(
            self.layers, len(self.layers), inputs.views, byref(batch), byref(self.final_norm), x.data_ptr()
        )

    # --- structures

    def layer_struct(self, block: LoweredBlock) -> LayerStruct:
        """Return the structure of a block, which points to its weights."""
        layer = LayerStruct(PLACEMENT_CODES[block.placement], block.gated)
        layer.branch_scale, layer.activation = block.branch_scale, activation_struct(block.activation)
        layer.heads = self.heads(block.attention)
        layer.query_key_value = self.matrix_struct(block.query_key_value)
        layer.attention_output = self.matrix_struct(block.attention_output)
        layer.gate_and_up = self.matrix_struct(block.gate_and_up)
        layer.down = self.matrix_struct(block.down)
        residuals = {_ATTENTION: block.attention_residual, FEED_FORWARD: block.feed_forward_residual}
        if block.cross_attention is not None:
            layer.has_cross_attention = 1
            layer.cross_heads = self.heads(block.cross_attention.attention)
            layer.cross_query = self.matrix_struct(block.cross_attention.query)
            layer.cross_output = self.matrix_struct(block.cross_attention.output)
            residuals[CROSS_ATTENTION] = block.cross_attention.residual
        for branch, residual in residuals.items():
            layer.norms[branch] = self.norm_struct(residual.norm)
            layer.branch_norms[branch] = self.norm_struct(residual.branch_norm)
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
        query, key = self.norm_settings_struct(norms.query), self.norm_settings_struct(norms.key)
        if norms.scope == "shared":
            heads.query_norm, heads.key_norm = query, key
        else:
            heads.row_query_norm, heads.row_key_norm = query, key
        return heads

    def norm_struct(self, module: nn.Module) -> NormStruct:
        """Return the structure of a norm, with float32 copies of its weight and bias; NO_NORM for an identity."""
        return self.norm_settings_struct(lower_norm(module))

    def norm_settings_struct(self, norm: NormSettings | None) -> NormStruct:
        """Return the structure of a norm's settings; NO_NORM for None."""
        if norm is None:
            return NormStruct()
        weight = norm.weight.detach().float()
        weight_address = self.address_of(1 + weight if norm.unit_offset else weight)
        bias_address = None if norm.bias is None else self.address_of(norm.bias.detach().float())
        return NormStruct(NORM_CODES[norm.kind], norm.epsilon, weight_address, bias_address)

    def matrix_struct(self, projection: Projection) -> MatrixStruct:
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


def activation_struct(activation: LoweredActivation) -> ActivationStruct:
    """Return the structure of an activation with its numbers."""
    struct = ActivationStruct(ACTIVATION_CODES[activation.name])
    if activation.clamp is not None:
        struct.limit, struct.up_offset = activation.clamp.limit, activation.clamp.up_offset
    if (xielu := activation.xielu) is not None:
        struct.positive, struct.negative = (float(number) for number in xielu.factors())
        struct.beta, struct.epsilon = float(xielu.beta), float(xielu.epsilon)
    return struct
