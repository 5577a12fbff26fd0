"""Read the tensors of quantized Hugging Face folders under the names that full weights have.

    quantization = read_quantization(settings); tensors = quantization.open(stored, where, keep_packed=False)

`quantization_config` in config.json names the method. Each method stores a matrix as several tensors: MODULE.qweight,
MODULE.qzeros and MODULE.scales of GPTQ become MODULE.weight, and EXPERTS_blocks and EXPERTS_scales of MXFP4 become
EXPERTS. A tensor without such parts is read as it is, so that a
folder whose weights were dequantized since loads as well.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from clearhead.backends import PackedWeight, pack_quants
from clearhead.checkpoint import quantized_formats as formats
from clearhead.checkpoint.mxfp4 import Mxfp4Experts
from clearhead.checkpoint.quantized_formats import Parts, QuantGroups
from clearhead.checkpoint.tensors import LazyTensors
from clearhead.errors import ClearheadError, quote
from clearhead.families import Settings

_KERNEL_GROUP = 32  # columns that share a scale in the formats of the kernels
_COMPRESSED_FORMATS = (
    "pack-quantized",
    "float-quantized",
    "int-quantized",
    "naive-quantized",
    "mixed-precision",
    "dense",
)


Stored = Tensor | QuantGroups | Mxfp4Experts


@dataclass(frozen=True)
class Layout:
    """How a method stores a matrix: ends of names after MODULE, and what computes the values from these parts."""

    main: str  # replaced by `weight` in the name of the matrix
    required: tuple[str, ...]  # the first one tells that the matrix is quantized
    optional: str  # regular expression of further parts
    read: Callable[[Parts], Stored]
    weight: str = ".weight"


@dataclass
class Quantization:
    """The method of a folder. `num_dequantized` and `num_packed` count the matrices that have been read."""

    method: str
    layouts: tuple[Layout, ...]
    num_dequantized: int = field(default=0)
    num_packed: int = field(default=0)

    def names(self, stored: Iterable[str]) -> dict[str, tuple[Layout, list[str]] | None]:
        """Return the names of all tensors with their parts; None for those that are not quantized."""
        stored = dict.fromkeys(stored)
        found: dict[str, tuple[Layout, list[str]] | None] = {}
        parts: set[str] = set()
        by_module = _by_module(stored)
        for layout in self.layouts:
            for module, ends in by_module.items():
                if layout.main in ends and layout.required[0] in ends and module + layout.weight not in found:
                    own = [end for end in ends if _belongs(end, layout)]
                    found[module + layout.weight] = layout, own
                    parts |= {_join(module, end) for end in own}
        return {name: None for name in stored if name not in parts} | found

    def open(
        self, stored: Mapping[str, Tensor], where: str, *, keep_packed: bool
    ) -> LazyTensors[Tensor | PackedWeight]:
        """Return the tensors with quantized matrices in float32, or packed if that was asked for and is possible."""
        names = self.names(stored)

        def read(name: str) -> Tensor | PackedWeight:
            found = names[name]
            if found is None:
                return stored[name]
            layout, ends = found
            module = name.removesuffix(layout.weight)
            missing = next((end for end in layout.required if end not in ends), None)
            if missing is not None:
                raise ClearheadError(f"{where} lacks the tensor {_join(module[:100], missing)}; it is incomplete")
            try:
                return self._values(layout.read({end: stored[_join(module, end)] for end in ends}), keep_packed)
            except (ClearheadError, RuntimeError) as error:
                raise ClearheadError(f"{where}: the tensor {name[:100]} cannot be read: {error}") from None

        return LazyTensors(names, read)

    def _values(self, stored: Stored, keep_packed: bool) -> Tensor | PackedWeight:
        packed = None
        if keep_packed and not isinstance(stored, Tensor):
            packed = stored.pack() if isinstance(stored, Mxfp4Experts) else _pack_groups(stored)
        if packed is not None:
            self.num_packed += 1
            return packed
        self.num_dequantized += 1
        return stored if isinstance(stored, Tensor) else stored.dequantize()

    def note(self, where: str, dtype: torch.dtype | None) -> str | None:
        """Return one line that says that matrices were dequantized; None if none was."""
        if not self.num_dequantized:
            return None
        kept = f"; {self.num_packed} are kept packed" if self.num_packed else ""
        plain = str(dtype).removeprefix("torch.")
        return (
            f"{where}: {self.num_dequantized} matrices in {self.method} were dequantized to {plain}, so they take the "
            f"memory of full weights{kept}"
        )


def _by_module(stored: Iterable[str]) -> dict[str, list[str]]:
    """Return the suffixes of the tensors of each module, such as "qweight" after a dot, or "_blocks"."""
    modules: dict[str, list[str]] = {}
    for name in stored:
        module, _, end = name.rpartition(".")
        inner = re.fullmatch(r"(.+)\.(weight\.(?:quant_state\.)?)", module + ".")  # bitsandbytes: MODULE.weight.absmax
        experts = re.fullmatch(r"(.+)(_blocks|_scales)", name)
        if inner is not None:
            module, end = inner[1], inner[2] + end
        elif experts is not None:
            module, end = experts[1], experts[2]
        modules.setdefault(module, []).append(end)
    return modules


def _join(module: str, end: str) -> str:
    return module + end if end.startswith("_") else f"{module}.{end}"


def _belongs(end: str, layout: Layout) -> bool:
    return end == layout.main or end in layout.required or re.fullmatch(layout.optional, end) is not None


def _pack_groups(groups: QuantGroups) -> PackedWeight | None:
    """Return a matrix in the form that kernels compute with; None if that would change more than offsets' last bits."""
    columns = groups.quants.shape[1]
    size = columns // groups.scales.shape[1]
    regular = groups.group_of_column is None and size * groups.scales.shape[1] == columns and size % _KERNEL_GROUP == 0
    scales = groups.scales.half()
    if not regular or not torch.equal(scales.float(), groups.scales.float()) or not scales.isfinite().all():
        return None
    repeats = size // _KERNEL_GROUP
    zeros = torch.zeros_like(scales, dtype=torch.int16) if groups.zeros is None else groups.zeros.short()
    scales = scales.repeat_interleave(repeats, dim=1)
    if groups.quants.dtype == torch.uint8 and groups.quants.max() <= 15:
        if bool((zeros == 8).all()):
            return pack_quants(groups.quants, scales, None)
        offsets = (-scales.float() * zeros.repeat_interleave(repeats, dim=1).float()).half()
        return pack_quants(groups.quants, scales, offsets)
    centered = groups.quants.short() - zeros.repeat_interleave(size, dim=1)
    if centered.min() < -127 or centered.max() > 127:
        return None
    return pack_quants(centered.to(torch.int8), scales, None)


# --- config.json


def read_quantization(settings: Settings) -> Quantization | None:
    """Return the method that config.json declares; None if there is none, or if it is not supported."""
    declared = settings.object("quantization_config")
    if not declared.data:
        declared = settings.object("text_config").object("quantization_config")
    method = declared.data.get("quant_method")
    readers = {
        "gptq": _read_gptq,
        "awq": _read_awq,
        "compressed-tensors": _read_compressed,
        "bitsandbytes": _read_bitsandbytes,
        "fp8": _read_fp8,
        "fbgemm_fp8": _read_fp8,
        "mxfp4": _read_mxfp4,
    }
    if not isinstance(method, str) or method not in readers:
        return None
    return readers[method](declared)


def _read_gptq(declared: Settings) -> Quantization:
    bits, stored_as = declared.integer("bits"), declared.data.get("checkpoint_format", "gptq")
    declared.allow_only("bits", 2, 4, 8)
    declared.allow_only("checkpoint_format", "gptq", "gptq_v2")
    if declared.data.get("dynamic"):
        raise ClearheadError(f"{declared.where}: GPTQ with other bits for some modules (dynamic) is not supported")
    shift = 1 if stored_as == "gptq" else 0

    def read(parts: Parts) -> QuantGroups:
        return formats.gptq_groups(parts, bits=bits, zero_shift=shift)

    return Quantization(f"GPTQ ({bits} bits)", (Layout("qweight", ("qzeros", "scales"), "g_idx", read),))


def _read_awq(declared: Settings) -> Quantization:
    declared.allow_only("bits", 4)
    declared.allow_only("version", "gemm", "GEMM")
    layout = Layout("qweight", ("qzeros", "scales"), "(?!)", formats.awq_groups)
    return Quantization("AWQ (4 bits)", (layout,))


def _read_compressed(declared: Settings) -> Quantization:
    stored_as = declared.data.get("format", "dense")
    if stored_as not in _COMPRESSED_FORMATS:
        known = ", ".join(_COMPRESSED_FORMATS)
        raise ClearheadError(
            f"{declared.where}: compressed-tensors in the format {quote(str(stored_as))} are not supported; "
            f"supported are {known}"
        )
    declared.object("sparsity_config").allow_only("format", "dense")
    blocks = {
        size
        for group in declared.object("config_groups").data.values()
        if (size := _block_of(group, declared.where)) is not None
    }
    if len(blocks) > 1:
        raise ClearheadError(f"{declared.where}: compressed-tensors with blocks of several sizes are not supported")
    block = next(iter(blocks), None)

    def read_plain(parts: Parts) -> Tensor | QuantGroups:
        if parts["weight"].dtype == torch.float8_e4m3fn:
            return formats.dequantize_float8(parts["weight"], parts["weight_scale"], block)
        return formats.plain_int_groups(parts)

    unused = r"(?:input|output)_(?:scale|zero_point)|weight_zero_point"  # activations are not quantized here
    packed = Layout("weight_packed", ("weight_scale", "weight_shape"), f"{unused}|weight_g_idx", _read_packed)
    plain = Layout("weight", ("weight_scale",), unused, read_plain)
    return Quantization(f"compressed-tensors ({stored_as})", (packed, plain))


def _read_packed(parts: Parts) -> QuantGroups:
    """Return a packed matrix; the shapes tell whether its integers have 4 or 8 bits."""
    words, shape = parts["weight_packed"], parts["weight_shape"]
    columns = int(shape.flatten()[-1]) if shape.numel() == 2 and not shape.is_floating_point() else 0
    width = words.shape[-1] if words.ndim == 2 else 0
    bits = next((bits for bits in (4, 8) if width == -(-columns * bits // 32)), None)
    if bits is None or not width:
        raise ClearheadError(
            f"only integers of 4 and 8 bits are supported; {width} words per row do not hold {columns} of either"
        )
    return formats.packed_int_groups(parts, bits=bits)


def _block_of(group: object, where: str) -> tuple[int, int] | None:
    """Return the block of a group of modules in the strategy `block`; None for other strategies."""
    weights = Settings(group, where).object("weights").data if isinstance(group, dict) else {}
    return _block(weights.get("block_structure"), where) if weights.get("strategy") == "block" else None


def _block(value: object, where: str) -> tuple[int, int]:
    """Return rows and columns that share a scale."""
    if isinstance(value, list) and len(value) == 2 and all(type(size) is int and 0 < size < 1 << 20 for size in value):
        return value[0], value[1]
    raise ClearheadError(f"{where}: the block size must be two whole numbers, not {value!r:.60}")


def _read_bitsandbytes(declared: Settings) -> Quantization:
    def read_rows(parts: Parts) -> Tensor:
        layout = parts.get("weight_format")
        if layout is not None and bool(layout.bool().any()):
            raise ClearheadError("weight_format is not 0; only rows in their usual order are supported")
        return formats.dequantize_row_int8(parts["weight"], parts["SCB"])

    nested = r"weight\.(?:nested_absmax|nested_quant_map|quant_state\.bitsandbytes__(?:nf4|fp4))"
    rows = Layout("weight", ("SCB",), "weight_format", read_rows)
    table = Layout("weight", ("weight.absmax", "weight.quant_map"), nested, formats.dequantize_table_int4)
    bits = "4 bits" if declared.data.get("load_in_4bit") is True else "8 bits"
    return Quantization(f"bitsandbytes ({bits})", (rows, table))


def _read_fp8(declared: Settings) -> Quantization:
    size = declared.data.get("weight_block_size", [128, 128] if declared.data["quant_method"] == "fp8" else None)
    block = None if size is None else _block(size, declared.where)
    scale = "weight_scale_inv" if declared.data["quant_method"] == "fp8" else "weight_scale"

    def read(parts: Parts) -> Tensor:
        return formats.dequantize_float8(parts["weight"], parts[scale], block)

    layout = Layout("weight", (scale,), r"input_scale(?:_ub)?|activation_scale", read)
    return Quantization("FP8", (layout,))


def _read_mxfp4(declared: Settings) -> Quantization:
    def read(parts: Parts) -> Mxfp4Experts:
        return Mxfp4Experts(parts["_blocks"], parts["_scales"])

    return Quantization("MXFP4", (Layout("_blocks", ("_scales",), "(?!)", read, weight=""),))
