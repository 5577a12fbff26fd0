"""The structures of the C++ kernels as ctypes classes, with the same fields in the same order.

    Heads.scale.offset, LayerStruct.heads.offset    # in bytes, as in C++

They hold addresses only: whoever keeps a structure must keep the tensors it points to.
"""

import ctypes
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

# Codes of the C++ enums.
NORM_CODES = {"rms": 1, "layer": 2, "deviation": 3}  # 0: no norm
ACTIVATION_CODES = {  # 0: the identity
    "relu": 1,
    "gelu": 2,
    "gelu_tanh": 3,
    "silu": 4,
    "relu_squared": 5,
    "gelu_quick": 6,
    "tanh": 7,
    "xielu": 8,
}
# In `branch`, the norm before a branch is the identity; in `parallel`, both branches have the same norm.
PLACEMENT_CODES = {"pre": 0, "post": 1, "sandwich": 2, "branch": 2, "parallel": 3, "parallel_norms": 3}


class MatrixStruct(ctypes.Structure):
    """A weight (N, K), plain or packed, and its bias (N,)."""

    _fields_ = [
        ("kind", c_int32),
        ("num_groups", c_int32),
        ("num_rows", c_int64),
        ("num_columns", c_int64),
        ("values", c_void_p),
        ("scales", c_void_p),
        ("offsets", c_void_p),
        ("bias", c_void_p),
        ("high_bits", c_void_p),
        ("group_scales", c_void_p),
        ("group_offsets", c_void_p),
    ]


class NormStruct(ctypes.Structure):
    """An RMS norm or a layer norm; kind 0 leaves its input unchanged."""

    _fields_ = [("kind", c_int32), ("epsilon", c_float), ("weight", c_void_p), ("bias", c_void_p)]


class Heads(ctypes.Structure):
    """Head sizes, rotation, scale and norms of one attention layer."""

    _fields_ = [
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_width", c_int32),
        ("rotary_pairs", c_int32),
        ("interleaved", c_int32),
        ("scale", c_float),
        ("query_norm", NormStruct),
        ("key_norm", NormStruct),
        ("norm_after_rotation", c_int32),
        ("is_joint", c_int32),
        ("clip", c_float),
        ("row_query_norm", NormStruct),
        ("row_key_norm", NormStruct),
        ("softcap", c_float),
        ("caps_last", c_int32),
        ("sinks", c_void_p),
    ]


class KeyValueView(ctypes.Structure):
    """Keys and values (B, K, capacity, H) of one layer, the slots in use, the mask, biases and temperatures.

    Addresses are plain integers, so that numpy can set those of all layers at once.
    """

    _fields_ = [
        ("keys", c_int64),
        ("values", c_int64),
        ("row_stride", c_int64),
        ("head_stride", c_int64),
        ("slot_stride", c_int64),
        ("slot", c_int64),
        ("num_slots", c_int64),
        ("allowed", c_int64),
        ("is_bfloat16", c_int64),
        ("bias", c_int64),
        ("bias_row_stride", c_int64),
        ("bias_head_stride", c_int64),
        ("bias_token_stride", c_int64),
        ("temperatures", c_int64),
        ("temperature_row_stride", c_int64),
    ]

    def point_to(self, key: Tensor, value: Tensor) -> None:
        """Set the addresses and strides to those of two tensors with equal strides."""
        self.keys, self.values = key.data_ptr(), value.data_ptr()
        self.row_stride, self.head_stride, self.slot_stride = key.stride()[:3]
        self.is_bfloat16 = key.dtype == torch.bfloat16


class RotationAngles(ctypes.Structure):
    """Cosines and sines (B or 1, T, rotary_pairs) of the new tokens' positions."""

    _fields_ = [("cosine", c_int64), ("sine", c_int64), ("row_stride", c_int64)]


class PackedBatchStruct(ctypes.Structure):
    """The layout of packed tokens (cache/packed_cache.py)."""

    _fields_ = [
        ("num_sequences", c_int64),
        ("num_tokens", c_int64),
        ("page_size", c_int64),
        ("table_stride", c_int64),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("starts", c_void_p),
        ("lengths", c_void_p),
        ("tables", c_void_p),
    ]


class PageView(ctypes.Structure):
    """Keys and values (num_pages, K, page_size, H) of one layer, its attention pattern, and its tables."""

    _fields_ = [
        ("keys", c_int64),
        ("values", c_int64),
        ("is_bfloat16", c_int64),
        ("window", c_int64),
        ("chunk", c_int64),
        ("cosine", c_int64),
        ("sine", c_int64),
        ("bias", c_int64),
        ("bias_length", c_int64),
        ("temperatures", c_int64),
    ]


class ActivationStruct(ctypes.Structure):
    """An activation, the clamp of its gate (limit 0: none) and the numbers of xIELU."""

    _fields_ = [
        ("kind", c_int32),
        ("limit", c_float),
        ("up_offset", c_float),
        ("positive", c_float),
        ("negative", c_float),
        ("beta", c_float),
        ("epsilon", c_float),
    ]


class MixtureStruct(ctypes.Structure):
    """A mixture of experts: how its router chooses, and the matrices of its experts and of the shared expert."""

    _fields_ = [
        ("num_experts", c_int32),
        ("num_chosen", c_int32),
        ("uses_sigmoid", c_int32),
        ("weighs_input", c_int32),
        ("renormalizes", c_int32),
        ("gated", c_int32),
        ("num_groups", c_int32),
        ("num_kept", c_int32),
        ("sums_top2", c_int32),
        ("has_shared", c_int32),
        ("shared_gated", c_int32),
        ("has_shared_gate", c_int32),
        ("softcap", c_float),
        ("renormalize_epsilon", c_float),
        ("scale", c_float),
        ("divisor", c_float),
        ("router", MatrixStruct),
        ("selection_bias", c_void_p),
        ("gate", c_void_p),
        ("up", c_void_p),
        ("down", c_void_p),
        ("activation", ActivationStruct),
        ("shared_activation", ActivationStruct),
        ("shared_gate_and_up", MatrixStruct),
        ("shared_down", MatrixStruct),
        ("shared_gate", MatrixStruct),
    ]


class LatentStruct(ctypes.Structure):
    """Latent attention in its absorbed form: sizes, norms, and the matrices of each head."""

    _fields_ = [
        ("num_heads", c_int32),
        ("latent_rank", c_int32),
        ("plain_width", c_int32),
        ("value_width", c_int32),
        ("rotary_pairs", c_int32),
        ("interleaved", c_int32),
        ("has_query_up", c_int32),
        ("query_norm", NormStruct),
        ("latent_norm", NormStruct),
        ("query_up", MatrixStruct),
        ("to_key", c_void_p),
        ("to_value", c_void_p),
    ]


class LayerStruct(ctypes.Structure):
    """All weights and settings of one block."""

    _fields_ = [
        ("placement", c_int32),
        ("gated", c_int32),
        ("has_cross_attention", c_int32),
        ("heads", Heads),
        ("cross_heads", Heads),
        ("norms", NormStruct * 3),
        ("branch_norms", NormStruct * 3),
        ("query_key_value", MatrixStruct),
        ("attention_output", MatrixStruct),
        ("cross_query", MatrixStruct),
        ("cross_output", MatrixStruct),
        ("gate_and_up", MatrixStruct),
        ("down", MatrixStruct),
        ("activation", ActivationStruct),
        ("branch_scale", c_float),
        ("mixture", c_void_p),
        ("latent", c_void_p),
    ]


SIGNATURES = {
    "clearhead_run_layers": [
        *(POINTER(LayerStruct), c_int64, POINTER(KeyValueView), POINTER(KeyValueView), POINTER(RotationAngles)),
        *(POINTER(NormStruct), c_void_p, c_int64, c_int64),
    ],
    "clearhead_run_packed": [
        *(POINTER(LayerStruct), c_int64, POINTER(PageView), POINTER(PackedBatchStruct)),
        *(POINTER(PageView), POINTER(PackedBatchStruct), POINTER(NormStruct), c_void_p),
    ],
    "clearhead_linear": [
        c_void_p, c_void_p, c_int64, POINTER(MatrixStruct), POINTER(NormStruct), c_int32, c_int32, c_void_p,
    ],
    "clearhead_attend_token": [
        c_void_p, c_void_p, c_int64, POINTER(Heads), POINTER(KeyValueView), POINTER(RotationAngles), c_int32,
    ],
    "clearhead_attend_prompt": [
        c_void_p, c_void_p, c_int64, c_int64, POINTER(Heads), POINTER(KeyValueView), c_int32,
    ],
    "clearhead_unpack": [c_void_p, POINTER(MatrixStruct), c_int32],
}  # fmt: skip
"""Argument types of the exported kernels, each of which returns 0, or 1 if an allocation failed."""
