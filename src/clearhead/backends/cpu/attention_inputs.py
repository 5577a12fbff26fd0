"""What the kernels need to know in addition to the weights, set anew for every call: caches, masks and rotations.

    inputs = AttentionInputs(configs, cross_configs, dtype); referenced = inputs.prepare(cache, positions, batch)

The structures of all layers are arrays that numpy writes at once: per-layer Python code would cost more than the step
of a small model.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn

from clearhead.architecture import Causal, GroupedAttention, Rope
from clearhead.backends.cpu_kernels import KeyValueView, RotationAngles
from clearhead.backends.lowering import LoweredAttention, rotation_table
from clearhead.backends.lowering_scores import has_bias, score_biases, score_temperatures
from clearhead.cache import KeyValueCache, key_value_shape
from clearhead.errors import ClearheadError
from clearhead.model import EncoderOutput, cross_attention_mask, make_mask

_FIRST_TABLE_LENGTH = 512  # positions; a table doubles when it becomes too short


@dataclass
class AttentionGroup:
    """Layers with equal attention configs and biases, which share slots, mask and tables of positions.

    Comparing configs by value for every layer and token would be slow, so equal ones are grouped once.
    """

    layers: np.ndarray  # their numbers
    config: GroupedAttention
    relative_bias: nn.Embedding | None  # the bias of each of T5's buckets
    table: tuple[Tensor, Tensor] | None  # cosines and sines (length, rotary_pairs)
    biases: Tensor | None = None  # (N, length), from distance length - 1 down to 0
    temperatures: Tensor | None = None  # (length,)

    def table_for(self, largest: int) -> tuple[Tensor, Tensor]:
        """Return the table, which contains the position `largest`."""
        assert self.table is not None
        if largest >= len(self.table[0]):
            self.table = rotation_table(self.config, 2 * largest)
        return self.table

    def biases_for(self, largest: int) -> Tensor:
        """Return the biases (N, length) of distances up to `largest`."""
        if self.biases is None or largest >= self.biases.shape[1]:
            length = max(_FIRST_TABLE_LENGTH, 2 * largest)
            self.biases = score_biases(self.config, self.relative_bias, length)
        return self.biases

    def temperatures_for(self, largest: int) -> Tensor:
        """Return the temperatures (length,) of positions up to `largest`."""
        if self.temperatures is None or largest >= len(self.temperatures):
            self.temperatures = score_temperatures(self.config, max(_FIRST_TABLE_LENGTH, 2 * largest))
        return self.temperatures


class AttentionInputs:
    """The structures for caches and rotations of all layers of a stack."""

    def __init__(
        self, attentions: Sequence[LoweredAttention], cross_configs: Sequence[GroupedAttention], dtype: torch.dtype
    ):
        self.configs, self.cross_configs, self.dtype = [each.config for each in attentions], cross_configs, dtype
        configs = self.configs
        kinds = [(each.config, each.relative_bias) for each in attentions]
        self.groups = [
            AttentionGroup(
                np.array([number for number, other in enumerate(kinds) if other == (config, relative_bias)]),
                config,
                relative_bias,
                rotation_table(config, _FIRST_TABLE_LENGTH) if isinstance(config.position, Rope) else None,
            )
            for config, relative_bias in dict.fromkeys(kinds)
        ]
        self.views = (KeyValueView * len(configs))()
        self.cross_views = (KeyValueView * len(configs))()
        self.angles = (RotationAngles * len(configs))()
        self.view_fields, self.angle_fields = np.ctypeslib.as_array(self.views), np.ctypeslib.as_array(self.angles)
        self.bound_buffers: list[ref[Tensor]] = []  # the cache buffers that `views` points to
        self.bound_capacity = 0  # tokens that fit into all of them; 0 if one is a ring buffer
        self.row_capacity = 0  # slots per row, if all buffers have rows of the same length; otherwise 0

    def prepare(self, cache: KeyValueCache, positions: Tensor, batch: int) -> list[Tensor]:
        """Point the structures to a cache with room for the new tokens at `positions` (B or 1, T).

        Return temporary tensors that must live until the kernel returns.
        """
        slots = self.bind(cache, batch, positions.shape[1])
        referenced = []
        for group in self.groups:
            slot, num_slots = slots[int(group.layers[0])]
            self.view_fields["slot"][group.layers], self.view_fields["num_slots"][group.layers] = slot, num_slots
            if group.table is not None:
                referenced += self.set_rotations(group, positions, cache)
            referenced += self.set_mask(group, cache, (batch, 1, positions.shape[1], num_slots))
            if has_bias(group.config) or group.config.temperature is not None:
                referenced += self.set_score_terms(group, cache, cache.length + positions.shape[1] - 1)
        return referenced

    def bind(self, cache: KeyValueCache, batch: int, num_new: int) -> list[tuple[int, int]]:
        """Point the views to the cache's buffers; return the first new slot and the number of slots of each layer."""
        buffers = cache.buffers()
        same = len(buffers) == len(self.bound_buffers) and all(
            map(operator.is_, map(operator.call, self.bound_buffers), buffers)
        )
        if same and cache.length + num_new <= self.bound_capacity:
            return [(cache.length, cache.length + num_new)] * len(self.configs)
        self.bound_buffers, self.bound_capacity, self.row_capacity = (
            [],
            0,
            0,
        )  # nothing is bound if an error occurs below
        slots = []
        for layer, (config, view) in enumerate(zip(self.configs, self.views, strict=True)):
            shape = (batch, *key_value_shape(config))
            reserved = cache.reserve(layer, shape, num_new, self.dtype)
            self.check_sizes(reserved.key, reserved.value, config, batch)
            view.point_to(reserved.key, reserved.value)
            slots.append((reserved.slot, reserved.num_slots))
        buffers = cache.buffers()
        self.bound_buffers = [ref(buffer) for buffer in buffers]
        self.bound_capacity = min(buffer.shape[2] for buffer in buffers) if cache.is_contiguous else 0
        if all(buffer.is_contiguous() and buffer.shape[2] == self.bound_capacity for buffer in buffers):
            self.row_capacity = self.bound_capacity
        return slots

    def check_sizes(self, key: Tensor, value: Tensor, config: GroupedAttention, batch: int) -> None:
        """Raise ClearheadError if keys or values have other sizes than the kernels would read."""
        heads, *widths = key_value_shape(config)
        for part, width in zip((key, value), widths, strict=True):
            expected = (batch, heads, width, self.dtype, "cpu")
            found = (*part.shape[:2], part.shape[3], part.dtype, part.device.type)
            if found != expected:
                raise ClearheadError(
                    f"the cache holds keys and values of (batch, heads, width, dtype, device) {found}, but this call "
                    f"needs {expected}; start with a new cache"
                )

    def set_mask(self, group: AttentionGroup, cache: KeyValueCache, shape: tuple[int, int, int, int]) -> list[Tensor]:
        """Set the mask (B, 1, T, S) of a group of layers, and return its tensor."""
        pattern = group.config.pattern
        if cache.attention_mask is None and isinstance(pattern, Causal):  # the kernel's own causal mask is enough
            self.view_fields["allowed"][group.layers] = 0
            return []
        allowed = make_mask(pattern, cache.attention_indices(pattern)).allowed
        assert allowed is not None
        allowed = allowed.expand(shape).contiguous()
        self.view_fields["allowed"][group.layers] = allowed.data_ptr()
        return [allowed]

    def set_rotations(self, group: AttentionGroup, positions: Tensor, cache: KeyValueCache) -> list[Tensor]:
        """Set cosines and sines of the new positions for a group of layers, and return their tensors."""
        largest = cache.length + positions.shape[1] - 1  # positions of padded sequences are smaller
        cosine, sine = group.table_for(largest)
        fields, layers = self.angle_fields, group.layers
        if cache.attention_mask is None:  # all sequences share consecutive rows of the table: no tensor is allocated
            offset = cache.length * cosine.shape[1] * cosine.element_size()
            fields["cosine"][layers], fields["sine"][layers] = cosine.data_ptr() + offset, sine.data_ptr() + offset
            fields["row_stride"][layers] = 0
            return []
        cosine, sine = cosine[positions], sine[positions]
        fields["cosine"][layers], fields["sine"][layers] = cosine.data_ptr(), sine.data_ptr()
        fields["row_stride"][layers] = cosine.stride(0) if len(positions) > 1 else 0
        return [cosine, sine]

    def set_score_terms(self, group: AttentionGroup, cache: KeyValueCache, largest: int) -> list[Tensor]:
        """Set the biases and temperatures of the new tokens for a group of layers, and return their tensors."""
        fields, layers, referenced = self.view_fields, group.layers, []
        is_plain = cache.attention_mask is None and cache.is_contiguous  # slot s then holds the token with index s
        indices = None if is_plain else cache.attention_indices(group.config.pattern)
        if has_bias(group.config):
            biases = group.biases_for(largest)
            last = biases.shape[1] - 1  # distance 0
            address, strides = biases.data_ptr() + (last - cache.length) * biases.element_size(), (0, last + 1, -1)
            if indices is not None:
                distance = indices.query_index[:, :, None] - indices.key_index[:, None, :]  # (B or 1, T, S)
                biases = biases[:, last - distance.clamp(0, last)]  # (N, B or 1, T, S)
                address, strides = biases.data_ptr(), (biases.stride(1), biases.stride(0), biases.stride(2))
                strides = strides if biases.shape[1] > 1 else (0, *strides[1:])
                referenced.append(biases)
            fields["bias"][layers] = address
            for name, stride in zip(("row", "head", "token"), strides, strict=True):
                fields[f"bias_{name}_stride"][layers] = stride
        if group.config.temperature is not None:
            temperatures = group.temperatures_for(largest)
            address, stride = temperatures.data_ptr() + cache.length * temperatures.element_size(), 0
            if indices is not None:
                temperatures = temperatures[indices.query_index.clamp(0, largest)].contiguous()  # (B or 1, T)
                address, stride = temperatures.data_ptr(), temperatures.stride(0) if len(temperatures) > 1 else 0
                referenced.append(temperatures)
            fields["temperatures"][layers], fields["temperature_row_stride"][layers] = address, stride
        return referenced

    def prepare_cross_attention(self, encoder_output: EncoderOutput, batch: int) -> list[Tensor]:
        """Point the cross-attention structures to an encoder output; return tensors to keep, as `prepare` does."""
        assert encoder_output.cross_keys_values is not None
        allowed = cross_attention_mask(encoder_output.mask).allowed
        num_slots = encoder_output.cross_keys_values[0][0].shape[2]
        mask = None if allowed is None else allowed.expand(batch, 1, 1, num_slots).contiguous()
        referenced = [] if mask is None else [mask]
        layers = zip(self.cross_configs, self.cross_views, encoder_output.cross_keys_values, strict=True)
        for config, view, (key, value) in layers:
            self.check_sizes(key, value, config, batch)
            if key.stride() != value.stride() or key.stride(3) != 1:
                key, value = key.contiguous(), value.contiguous()
                referenced += [key, value]
            view.point_to(key, value)
            view.num_slots, view.allowed = num_slots, 0 if mask is None else mask.data_ptr()
        return referenced
