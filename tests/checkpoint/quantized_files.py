"""Quantize matrices into the formats of Hugging Face folders, with the packing loops of the libraries that write them.

parts, expected = QUANTIZERS["gptq"].quantize(weight, generator); config = QUANTIZERS["gptq"].config
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32
NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip


@dataclass(frozen=True)
class Quantizer:
    quantize: Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]  # (N, K) -> stored parts, and what they stand for
    config: dict[str, Any]


def uneven_groups(weight: Tensor, bits: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Return quants (N, K), scales and zeros (N, G) of groups of 32 columns."""
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1).clamp(max=-1e-3), groups.amax(-1).clamp(min=1e-3)
    scales = ((high - low) / (2**bits - 1)).half()
    zeros = (-low / scales.float()).round().clamp(1, 2**bits - 1).int()
    quants = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 2**bits - 1).int()
    return quants.flatten(1), scales, zeros


def values(quants: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """scale * (q - z), written with loops over groups."""
    columns = []
    for column in range(quants.shape[1]):
        group = column // GROUP
        columns.append(scales[:, group].double() * (quants[:, column] - zeros[:, group]).double())
    return torch.stack(columns, dim=1).float()


def gptq(weight: Tensor, act_order: bool = False) -> tuple[dict[str, Tensor], Tensor]:
    """AutoGPTQ's pack(): intweight (K, N) along the rows, zeros - 1 along the columns."""
    quants, scales, zeros = uneven_groups(weight)
    by_input, stored_zeros = quants.T, (zeros - 1).T  # (K, N), (G, N)
    qweight = torch.zeros(len(by_input) // 8, len(weight), dtype=torch.int64)
    for row in range(len(by_input)):
        qweight[row // 8] |= by_input[row].long() << 4 * (row % 8)
    qzeros = torch.zeros(len(stored_zeros), len(weight) // 8, dtype=torch.int64)
    for column in range(len(weight)):
        qzeros[:, column // 8] |= stored_zeros[:, column].long() << 4 * (column % 8)
    index, expected = torch.arange(len(by_input)) // GROUP, values(quants, scales, zeros)
    if act_order:  # columns of the groups are scattered
        order = torch.randperm(len(by_input), generator=torch.Generator().manual_seed(1))
        by_input = by_input[order.argsort()]
        qweight.zero_()
        for row in range(len(by_input)):
            qweight[row // 8] |= by_input[row].long() << 4 * (row % 8)
        index, expected = index[order.argsort()], expected[:, order.argsort()]
    parts = {"qweight": to_int32(qweight), "qzeros": to_int32(qzeros), "scales": scales.T, "g_idx": index.int()}
    return parts, expected


def awq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """AutoAWQ's WQLinear_GEMM.from_linear: words along the outputs, with its order_map."""
    quants, scales, zeros = uneven_groups(weight)
    order_map = [0, 2, 4, 6, 1, 3, 5, 7]

    def pack(matrix: Tensor) -> Tensor:
        words = torch.zeros(len(matrix), matrix.shape[1] // 8, dtype=torch.int64)
        for column in range(words.shape[1]):
            for place in range(8):
                words[:, column] |= matrix[:, column * 8 + order_map[place]].long() << 4 * place
        return to_int32(words)

    parts = {"qweight": pack(quants.T), "qzeros": pack(zeros.T), "scales": scales.T}
    return parts, values(quants, scales, zeros)


def symmetric(weight: Tensor) -> tuple[Tensor, Tensor]:
    groups = weight.unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(-1) / 7).half()
    return (groups / scales.float()[..., None]).round().clamp(-8, 7).int().flatten(1), scales


def pack_quantized(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """pack_to_int32 of compressed-tensors: quants + 8 along the columns."""
    quants, scales = symmetric(weight)
    words = torch.zeros(len(weight), weight.shape[1] // 8, dtype=torch.int64)
    for column in range(weight.shape[1]):
        words[:, column // 8] |= (quants[:, column] + 8).long() << 4 * (column % 8)
    parts = {"weight_packed": to_int32(words), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
    return parts, values(quants, scales, torch.zeros_like(scales).int())


def float_quantized(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 448
    stored = (weight / scales).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale": scales, "input_scale": torch.ones(1)}, stored.float() * scales


def float8_blocks(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Blocks of 32 x 64 with a scale each; the last ones may be smaller."""
    stored, expected = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    scales = torch.empty(-(-len(weight) // 32), -(-weight.shape[1] // 64))
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            place = slice(32 * row, 32 * row + 32), slice(64 * column, 64 * column + 64)
            scales[row, column] = weight[place].abs().max() / 448
            stored[place] = (weight[place] / scales[row, column]).to(torch.float8_e4m3fn)
            expected[place] = stored[place].float() * scales[row, column]
    return {"weight": stored, "weight_scale_inv": scales}, expected


def row_int8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    largest = weight.abs().amax(1)
    stored = (weight * 127 / largest[:, None]).round().to(torch.int8)
    parts = {"weight": stored, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, (stored.double() * largest.double()[:, None] / 127).float()


def nf4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """bitsandbytes' quantize_4bit without nesting: blocks of 64, the first value in the high half of a byte."""
    blocks, table = weight.reshape(-1, 64), torch.tensor(NF4)
    magnitudes = blocks.abs().amax(1)
    indexes = ((blocks / magnitudes[:, None])[..., None] - table).abs().argmin(-1)
    stored = (indexes.flatten()[::2] << 4 | indexes.flatten()[1::2]).to(torch.uint8)[:, None]
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
    parts = {
        "weight": stored,
        "weight.absmax": magnitudes,
        "weight.quant_map": table,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return parts, (table[indexes] * magnitudes[:, None]).reshape(weight.shape)


def to_int32(words: Tensor) -> Tensor:
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _compressed(kind: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}}


QUANTIZERS = {
    "gptq": Quantizer(gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}),
    "gptq act order": Quantizer(
        lambda weight: gptq(weight, act_order=True),
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True},
    ),
    "awq": Quantizer(awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "pack-quantized": Quantizer(
        pack_quantized, _compressed("pack-quantized", num_bits=4, type="int", strategy="group")
    ),
    "float-quantized": Quantizer(
        float_quantized, _compressed("float-quantized", num_bits=8, type="float", strategy="channel")
    ),
    "fp8 blocks": Quantizer(float8_blocks, {"quant_method": "fp8", "weight_block_size": [32, 64]}),
    "int8": Quantizer(row_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "nf4": Quantizer(nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
}


def quantize_folder(folder: Path, name: str) -> dict[str, Tensor]:
    """Quantize the projections of a folder in place; return what their tensors stand for, by their names."""
    quantizer, expected = QUANTIZERS[name], {}
    stored = load_file(folder / "model.safetensors")
    for tensor_name in [each for each in stored if each.endswith("_proj.weight")]:
        parts, expected[tensor_name] = quantizer.quantize(stored.pop(tensor_name).float())
        module = tensor_name.removesuffix(".weight")
        stored |= {f"{module}.{end}": part.contiguous() for end, part in parts.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantizer.config}))
    return expected
