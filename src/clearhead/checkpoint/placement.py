"""Place the tensors of a checkpoint in a network that was built without memory.

    placer = TensorPlacer(network, "model.safetensors", LoadOptions(dtype=torch.bfloat16))

Each tensor is checked, split into ours, converted and put into the network before the next one is read. A weight that
is to be packed is packed at that moment. Loading therefore needs the memory of the final network and of one tensor, and
leaves that of the network: assembly.py returns the rest to the system.
"""

import torch
from torch import Size, Tensor, nn

from clearhead.architecture import ModelConfig
from clearhead.backends import PackedWeight, is_packable, pack_parameter, set_packed_weight
from clearhead.checkpoint.interface import LoadOptions
from clearhead.errors import ClearheadError
from clearhead.families import TensorRule, split_expert_index
from clearhead.model import RecurrentTranslator, Transformer

_MAX_QUANT = 128  # no packed format has a larger absolute quant


def stored_tensors(network: nn.Module) -> dict[str, Tensor]:
    """Return all tensors that a checkpoint holds: parameters (shared ones once) and the routers' selection biases."""
    return dict(network.named_parameters()) | dict(network.named_buffers())


def network_dtype(network: nn.Module) -> torch.dtype:
    """Return the dtype of a network's parameters."""
    return next(network.parameters()).dtype


class TensorPlacer:
    """Replaces the tensors of a network on the meta device by those of a checkpoint.

    `where` is the file or folder that error messages name.
    """

    def __init__(self, network: Transformer | RecurrentTranslator, where: str, options: LoadOptions):
        self.network, self.where = network, where
        self.dtype, self.device, self.bits = options.dtype, options.device, options.bits
        self.shapes = {name: tensor.shape for name, tensor in stored_tensors(network).items()}
        self.unplaced = set(self.shapes)
        self.stacked_experts: dict[str, Tensor] = {}  # tensors of which some experts are not placed yet
        self.unplaced_experts: dict[str, set[int]] = {}

    def place(self, name: str, rule: TensorRule, stored: Tensor | PackedWeight) -> int:
        """Place a stored tensor, which by `rule` holds one or several tensors of a Transformer; return its bytes."""
        assert isinstance(self.network, Transformer)
        targets = [split_expert_index(own_name) for own_name in rule.own_names]
        shapes = [self.shapes[own_name][0 if expert is None else 1 :] for own_name, expert in targets]
        if isinstance(stored, PackedWeight):
            whole = all(expert is None for _, expert in targets)
            if whole and all(is_packable(self.network, own_name) for own_name in rule.own_names):
                self.place_packed(name, rule, stored, shapes)
                return stored.num_bytes
            stored = stored.unpack()  # for example a table of positions
        self.check_values(name, stored)
        parts = split(rule, stored, shapes, self.network.config)
        if parts is None:
            raise self.shape_error(name, stored.shape, shapes)
        for (own_name, expert), part in zip(targets, parts, strict=True):
            if expert is None:
                self.set_tensor(own_name, part)
            else:
                self.set_expert(own_name, expert, part)
        return stored.nbytes

    def place_own(self, name: str, stored: Tensor) -> None:
        """Place a tensor that is stored under our own name."""
        self.check_values(name, stored)
        if stored.shape != self.shapes[name]:
            raise self.shape_error(name, stored.shape, [self.shapes[name]])
        self.set_tensor(name, stored)

    def place_packed(self, name: str, rule: TensorRule, packed: PackedWeight, shapes: list[Size]) -> None:
        """Place a packed matrix without unpacking it.

        A rule may reorder the rows of a matrix or split it into several. A block lies within one row, so the rule is
        applied to the row numbers, and the packed rows are gathered by them. The rows of all experts are stacked. A
        packed row is always one of ours, also where full weights are stored transposed.
        """
        assert isinstance(self.network, Transformer)
        self.check_packed_values(name, packed)
        num_rows = packed.shape[0]
        experts = shapes[0][:-2] if num_rows % shapes[0][:-2].numel() == 0 else ()
        rows = torch.arange(num_rows).view(*experts, -1, 1)
        stored = rows.transpose(-2, -1) if rule.transposed else rows
        parts = split(rule, stored, [Size((*shape[:-1], 1)) for shape in shapes], self.network.config)
        if parts is None or any(shape[-1] != packed.columns for shape in shapes):
            raise self.shape_error(name, packed.shape, shapes)
        for own_name, part in zip(rule.own_names, parts, strict=True):
            own = packed if torch.equal(part, rows) else packed.rows(part.flatten())
            set_packed_weight(self.network, own_name, own.to(self.device), self.dtype or torch.float32)
            self.unplaced.remove(own_name)

    def set_tensor(self, own_name: str, tensor: Tensor) -> None:
        """Put a tensor into the network under our name, converted, and packed if that was asked for."""
        # The bias that selects experts keeps its precision.
        dtype = None if own_name.endswith("selection_bias") else self.dtype
        dtype = dtype or tensor.dtype
        if self.bits and isinstance(self.network, Transformer) and is_packable(self.network, own_name):
            tensor = tensor.to(device=self.device)
            packed = pack_parameter(self.network.config, own_name, tensor, self.bits, dtype)
            set_packed_weight(self.network, own_name, packed, dtype)
        else:
            tensor = tensor.to(dtype=dtype, device=self.device).contiguous()
            owner_name, _, attribute = own_name.rpartition(".")
            owner = self.network.get_submodule(owner_name)
            setattr(owner, attribute, nn.Parameter(tensor) if attribute in owner._parameters else tensor)
        self.unplaced.remove(own_name)

    def set_expert(self, own_name: str, expert: int, tensor: Tensor) -> None:
        """Copy one expert's slice to its stacked tensor, which goes into the network when it is complete."""
        shape = self.shapes[own_name]
        if own_name not in self.stacked_experts:
            dtype = self.dtype or tensor.dtype
            self.stacked_experts[own_name] = torch.empty(shape, dtype=dtype, device=self.device)
            self.unplaced_experts[own_name] = set(range(shape[0]))
        self.stacked_experts[own_name][expert].copy_(tensor)
        self.unplaced_experts[own_name].discard(expert)
        if not self.unplaced_experts[own_name]:
            self.set_tensor(own_name, self.stacked_experts.pop(own_name))

    def finish(self) -> None:
        """Set the network to evaluation mode, after all its tensors have been placed."""
        assert not self.unplaced, f"the name table has no entry for {sorted(self.unplaced)}"
        self.network.eval()

    # --- checks

    def check_values(self, name: str, stored: Tensor) -> None:
        """Raise ClearheadError unless all values are finite floating-point numbers, also in the target dtype."""
        if not stored.is_floating_point():
            raise ClearheadError(f"{self.where}: {name} holds {stored.dtype}, not floating-point numbers")
        if stored.element_size() == 1:
            raise ClearheadError(
                f"{self.where}: {name} holds {stored.dtype} without scales; convert it to a wider dtype"
            )
        if not stored.numel():
            return
        extremes = torch.stack(torch.aminmax(stored))
        if not extremes.isfinite().all():
            raise ClearheadError(f"{self.where}: {name} holds NaN or infinite numbers; the file is damaged")
        if not extremes.to(dtype=self.dtype).isfinite().all():
            span = f"numbers from {extremes.min():g} to {extremes.max():g}"
            raise ClearheadError(f"{self.where}: {name} holds {span}, too large for {self.dtype}; give a wider dtype")

    def check_packed_values(self, name: str, packed: PackedWeight) -> None:
        """Raise the errors of `check_values`; unpack only if scales and offsets do not already exclude them."""
        # With group scales, quants of 6 bits are multiplied by integers of 8 bits, and offsets by integers of 6 bits.
        factor = 1 if packed.group_scales is None else _MAX_QUANT
        largest = factor * _MAX_QUANT * packed.scales.float().abs().max()
        if packed.offsets is not None:
            largest += factor * packed.offsets.float().abs().max()
        if not largest <= torch.finfo(self.dtype or torch.float32).max:  # also if it is NaN
            self.check_values(name, packed.unpack())

    def shape_error(self, name: str, stored_shape: tuple[int, ...], shapes: list[Size]) -> ClearheadError:
        """Return the error for a tensor that does not have the shapes that the config implies."""
        expected = " + ".join(str(tuple(shape)) for shape in shapes)
        return ClearheadError(f"{self.where}: {name} has shape {tuple(stored_shape)}; the config needs {expected}")


def split(rule: TensorRule, stored: Tensor, shapes: list[Size], config: ModelConfig) -> list[Tensor] | None:
    """Return the parts of a stored tensor, or None if they would not have these shapes."""
    try:
        parts = rule.split(stored, shapes, config)
    except RuntimeError:  # the shape of the whole does not fit the rule
        return None
    return parts if [part.shape for part in parts] == shapes else None
