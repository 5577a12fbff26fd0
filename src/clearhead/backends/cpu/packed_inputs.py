"""What the kernels need to know to run packed tokens: the pages of each sequence, attention patterns, rotation tables.

    inputs = PackedInputs(attention_groups, dtype); batch = inputs.prepare(cache)

Keys and values stay in their pages. The kernels derive everything else from the layout of the step. A contiguous cache
is a special case: every sequence has one page that holds all of its tokens. So a text has the same bits in the engine
and in the decode loop. In cross-attention, a token attends to the whole source of its sequence, as the last token of a
sequence attends to all of its tokens.
"""

from collections.abc import Sequence
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from clearhead.architecture import Chunked, GroupedAttention, SlidingWindow
from clearhead.backends.cpu.attention_inputs import AttentionGroup
from clearhead.backends.cpu_kernels import PackedBatchStruct, PageView
from clearhead.backends.lowering_scores import has_bias
from clearhead.cache import (
    PackedCache,
    PackedLayout,
    PagedEncoderOutput,
    PagePool,
    PageStorage,
    key_value_shape,
)
from clearhead.errors import ClearheadError


class PackedInputs:
    """The structures for the pages of all layers of a stack."""

    def __init__(self, groups: Sequence[AttentionGroup], dtype: torch.dtype):
        self.groups, self.dtype = groups, dtype
        self.views = (PageView * sum(len(group.layers) for group in groups))()
        self.fields = np.ctypeslib.as_array(self.views)
        self.fields["is_bfloat16"] = dtype == torch.bfloat16
        for group in groups:
            pattern = group.config.pattern
            self.fields["window"][group.layers] = pattern.size if isinstance(pattern, SlidingWindow) else 0
            self.fields["chunk"][group.layers] = pattern.size if isinstance(pattern, Chunked) else 0
        self.bound_storage: ref[PageStorage] | None = None  # `views` points to its tensors

    def prepare(self, cache: PackedCache) -> PackedBatchStruct:
        """Point the structures to the pages of a cache, and return the layout of its step.

        The layout's tensors must live until the kernel returns.
        """
        layout, pool = cache.layout, cache.storage.pool
        _check_tokens(layout, pool)
        _check_pages(layout, pool)
        if self.bound_storage is None or self.bound_storage() is not cache.storage:
            self.bind(cache)
        self.set_tables(int(layout.lengths.max()) - 1)
        return PackedBatchStruct(
            len(layout.lengths),
            len(layout.positions),
            pool.page_size,
            layout.page_tables.shape[1],
            layout.positions.data_ptr(),
            layout.slots.data_ptr(),
            layout.sequence_starts.data_ptr(),
            layout.lengths.data_ptr(),
            layout.page_tables.data_ptr(),
        )

    def set_tables(self, largest: int) -> None:
        """Point the structures to tables of rotations, biases and temperatures that contain the position `largest`."""
        for group in self.groups:
            if group.table is not None:
                cosine, sine = group.table_for(largest)
                self.fields["cosine"][group.layers], self.fields["sine"][group.layers] = (
                    cosine.data_ptr(),
                    sine.data_ptr(),
                )
            if has_bias(group.config):
                biases = group.biases_for(largest)
                self.fields["bias"][group.layers] = biases.data_ptr()
                self.fields["bias_length"][group.layers] = biases.shape[1]
            if group.config.temperature is not None:
                self.fields["temperatures"][group.layers] = group.temperatures_for(largest).data_ptr()

    def bind(self, cache: PackedCache) -> None:
        """Point the views to the pages of all layers."""
        self.bound_storage = None  # nothing is bound if an error occurs below
        for group in self.groups:
            for layer in group.layers.tolist():
                pages = cache.layer_pages(layer, key_value_shape(group.config), self.dtype)
                _bind_layer(self.fields, layer, pages, group.config, self.dtype, cache.storage.pool)
        self.bound_storage = ref(cache.storage)


class RowInputs(PackedInputs):
    """The structures for a contiguous cache (B, K, capacity, H): row b is page b, with `capacity` slots."""

    def prepare_rows(
        self, addresses: np.ndarray, length: int, num_rows: int, num_new: int, capacity: int
    ) -> tuple[PackedBatchStruct, list[np.ndarray]]:
        """Return the layout of `num_new` new tokens of each row after `length` earlier ones.

        addresses: of the keys and values of all layers, as fields of these names. The arrays that are returned too must
        live until the kernel returns.
        """
        self.fields["keys"], self.fields["values"] = addresses["keys"], addresses["values"]
        end = length + num_new
        self.set_tables(end - 1)
        rows = np.arange(num_rows + 1, dtype=np.int32)
        positions = np.tile(np.arange(length, end, dtype=np.int64), num_rows)
        slots = positions + rows[:-1].astype(np.int64).repeat(num_new) * capacity
        starts, lengths = rows * np.int32(num_new), np.full(num_rows, end, dtype=np.int32)
        arrays = [positions, slots, starts, lengths, rows]
        sizes = (num_rows, num_rows * num_new, capacity, 1)
        return PackedBatchStruct(*sizes, *(array.ctypes.data for array in arrays)), arrays


class SourceInputs:
    """The structures for the pages that the cross-attention of all layers reads."""

    def __init__(self, configs: Sequence[GroupedAttention], dtype: torch.dtype):
        self.configs, self.dtype = configs, dtype
        self.views = (PageView * len(configs))()
        self.fields = np.ctypeslib.as_array(self.views)
        self.fields["is_bfloat16"] = dtype == torch.bfloat16
        self.bound_storage: ref[PageStorage] | None = None  # `views` points to its tensors

    def prepare(self, sources: PagedEncoderOutput, targets: PackedLayout) -> tuple[PackedBatchStruct, list[np.ndarray]]:
        """Point the structures to the pages of sources, and return the layout of what new target tokens attend to.

        The arrays that are returned too must live until the kernel returns.
        """
        layout, storage = sources.layout, sources.storage
        _require(len(layout.lengths) == len(targets.lengths), "a target has no source")
        _check_pages(layout, storage.pool)
        if self.bound_storage is None or self.bound_storage() is not storage:
            self.bound_storage = None  # nothing is bound if an error occurs below
            for layer, config in enumerate(self.configs):
                _bind_layer(self.fields, layer, storage.layers[layer], config, self.dtype, storage.pool)
            self.bound_storage = ref(storage)
        counts = np.diff(_array(targets.sequence_starts, np.int32))
        last_positions = (_array(layout.lengths, np.int32).astype(np.int64) - 1).repeat(counts)
        batch = PackedBatchStruct(
            len(counts),
            len(last_positions),
            storage.pool.page_size,
            layout.page_tables.shape[1],
            last_positions.ctypes.data,
            None,  # nothing is stored
            targets.sequence_starts.data_ptr(),
            layout.lengths.data_ptr(),
            layout.page_tables.data_ptr(),
        )
        return batch, [last_positions]


def _bind_layer(
    fields: np.ndarray,
    layer: int,
    pages: tuple[Tensor, Tensor],
    config: GroupedAttention,
    dtype: torch.dtype,
    pool: PagePool,
) -> None:
    """Point the structure of a layer to its pages; raise ClearheadError if they are not those of this model."""
    heads, *widths = key_value_shape(config)
    for name, tensor, width in zip(("keys", "values"), pages, widths, strict=True):
        expected = (pool.num_pages, heads, pool.page_size, width)
        if tensor.shape != expected or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ClearheadError(
                f"the pages of layer {layer} are {tuple(tensor.shape)} {tensor.dtype}, but this model "
                f"needs {expected} {dtype}; create them with PageStorage.for_stack"
            )
        fields[name][layer] = tensor.data_ptr()


# The kernels would read and write other memory if they could not follow a layout.


def _check_tokens(layout: PackedLayout, pool: PagePool) -> None:
    """Raise AssertionError unless the new tokens are the last of their sequences, and their slots exist."""
    starts, lengths = _array(layout.sequence_starts, np.int32), _array(layout.lengths, np.int32)
    slots = _array(layout.slots, np.int64)
    counts, num_tokens = np.diff(starts), len(slots)
    covers = (starts[0], starts[-1]) == (0, num_tokens) and counts.min() >= 0
    _require(covers, "the sequences do not cover the tokens")
    first_positions = lengths - counts - starts[:-1]
    positions = np.arange(num_tokens) + first_positions.repeat(counts)
    given = _array(layout.positions, np.int64)
    _require(np.array_equal(given, positions), "the tokens are not the last of a sequence")
    _require(positions.min() >= 0, "a sequence is shorter than its new tokens")
    _require(_is_within(slots, pool.num_pages * pool.page_size), "a slot is in no page")


def _check_pages(layout: PackedLayout, pool: PagePool) -> None:
    """Raise AssertionError unless all tokens of all sequences are in pages that exist."""
    lengths, tables = _array(layout.lengths, np.int32), _array(layout.page_tables, np.int32)
    _require(lengths.min() > 0, "a sequence has no tokens")
    _require(lengths.max() <= tables.shape[1] * pool.page_size, "a page table is shorter than its sequence")
    _require(_is_within(tables, pool.num_pages), "a page table contains a page that does not exist")


def _is_within(numbers: np.ndarray, end: int) -> bool:
    return bool(numbers.min() >= 0 and numbers.max() < end)


def _array(tensor: Tensor, dtype: type[np.generic]) -> np.ndarray:
    array: np.ndarray = tensor.numpy()
    if array.dtype != dtype or not array.flags.c_contiguous:
        raise AssertionError(f"the kernels read contiguous {dtype.__name__} numbers, not {array.dtype}")
    return array


def _require(condition: bool, message: str) -> None:
    """Raise AssertionError; unlike an assert statement, it is not removed by python -O."""
    if not condition:
        raise AssertionError(message)
