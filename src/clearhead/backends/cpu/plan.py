"""A decoder's layers as the structures of the C++ kernels, and the call that runs new tokens through all of them.

    plan = Plan(stack); plan.run(x, positions, encoder_output, cache); plan.run_packed(x, packed_cache)

A plan is built once: lowering.py merges the weights and layer_structures.py describes them. Every call then sets only
what changes (attention_inputs.py, packed_inputs.py). `detector` checks whether the plan still matches the modules.
"""

from ctypes import byref
from typing import cast

from torch import Tensor

from clearhead.backends.cpu.attention_inputs import AttentionInputs
from clearhead.backends.cpu.change_detector import ChangeDetector
from clearhead.backends.cpu.layer_structures import LayerStructures
from clearhead.backends.cpu.packed_inputs import PackedInputs, RowInputs, SourceInputs
from clearhead.backends.cpu_kernels import (
    LayerStruct,
    PackedBatchStruct,
    kernels_support_prompts,
    load_kernel_library,
)
from clearhead.backends.lowering import lower_block
from clearhead.cache import KeyValueCache, PackedCache, PagedEncoderOutput
from clearhead.model import Block, EncoderOutput, LayerStack


class Plan:
    """The layers of a stack, ready for the kernels; valid as long as `detector.unchanged()`."""

    def __init__(self, stack: LayerStack):
        self.structures = LayerStructures()
        shared = stack.relative_bias
        blocks = [lower_block(cast(Block, block), keep_formats=True, shared_bias=shared) for block in stack.layers]
        self.final_norm = self.structures.norm(stack.final_norm)
        self.layers = (LayerStruct * len(blocks))(*(self.structures.layer(block) for block in blocks))
        self.inputs = AttentionInputs(
            [block.attention for block in blocks],
            [block.cross_attention.attention.config for block in blocks if block.cross_attention is not None],
            next(stack.layers.parameters()).dtype,
        )
        self.packed_inputs = PackedInputs(self.inputs.groups, self.inputs.dtype)
        self.row_inputs = RowInputs(self.inputs.groups, self.inputs.dtype)
        self.source_inputs = SourceInputs(self.inputs.cross_configs, self.inputs.dtype)
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
        """Run x (B, T, D) as `run` does, with each row of an unpadded contiguous cache as one page.

        Sums are then added in the order that pages have. Return False, without running anything, if the buffers of the
        cache do not consist of such rows.
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

    def run_packed(self, x: Tensor, encoder_output: PagedEncoderOutput | None, cache: PackedCache) -> None:
        """Run packed tokens x (1, T, D) through all layers and the final norm, in place; write keys and values."""
        batch = self.packed_inputs.prepare(cache)
        if encoder_output is None:
            return self._call_packed(self.packed_inputs, batch, x)
        sources, referenced = self.source_inputs.prepare(encoder_output, cache.layout)
        self._call_packed(self.packed_inputs, batch, x, sources)
        del referenced  # the layout pointed to these arrays until here
        return None

    def _call_packed(
        self, inputs: PackedInputs, batch: PackedBatchStruct, x: Tensor, sources: PackedBatchStruct | None = None
    ) -> None:
        kernels = load_kernel_library()
        assert kernels is not None
        source_views = (None, None) if sources is None else (self.source_inputs.views, byref(sources))
        kernels.clearhead_run_packed(
            self.layers,
            len(self.layers),
            inputs.views,
            byref(batch),
            *source_views,
            byref(self.final_norm),
            x.data_ptr(),
        )
