"""Network modules that store packed weights or multiply in the CPU kernels, and the packing of a whole network.

    pack_network(network, "int4")

Linear layers, experts, token tables and the logit head are packed. Norms, biases, position tables and routers keep
full precision. In 4 bits, sensitive matrices keep 8 (sensitivity.py).
"""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from clearhead.architecture import Head
from clearhead.backends.cpu_kernels import multiply, unpack
from clearhead.backends.memory import return_freed_memory
from clearhead.backends.packed import PACKED_PARTS, Bits, PackedWeight
from clearhead.backends.sensitivity import pack_parameter
from clearhead.errors import ClearheadError
from clearhead.model import LayerStack, LogitHead, MixtureLayer, Transformer, apply_softcap

EXPERT_WEIGHTS = ("gate", "up", "down")  # attributes of a MixtureLayer


class PackedMatrix(nn.Module):
    """A packed weight stored as buffers, so that it moves with the network. `dtype` is that of the unpacked values."""

    quants: Tensor
    scales: Tensor
    offsets: Tensor | None
    high_bits: Tensor | None
    group_scales: Tensor | None
    group_offsets: Tensor | None

    def __init__(self, packed: PackedWeight, dtype: torch.dtype):
        super().__init__()
        self.columns, self.dtype = packed.columns, dtype
        self.set_packed(packed)

    def set_packed(self, packed: PackedWeight) -> None:
        """Replace the buffers by those of `packed`."""
        for name in PACKED_PARTS:
            self.register_buffer(name, getattr(packed, name))

    @property
    def packed(self) -> PackedWeight:
        """The weight, which shares memory with the buffers."""
        return PackedWeight(**{name: getattr(self, name) for name in PACKED_PARTS}, columns=self.columns)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Cast or move the module. Casting must not round the scales, so they are viewed as integers meanwhile."""
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.scales.device)).dtype
        self.view_scales(torch.int16)
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:  # the module stays usable if the other device runs out of memory
            self.view_scales(torch.float16)
        return self

    def view_scales(self, dtype: torch.dtype) -> None:
        """Reinterpret the bits of scales and offsets as `dtype`."""
        self.scales = self.scales.view(dtype)
        self.offsets = None if self.offsets is None else self.offsets.view(dtype)


class PackedLinear(PackedMatrix):
    """A linear layer with a packed weight."""

    def __init__(self, packed: PackedWeight, bias: nn.Parameter | None, dtype: torch.dtype):
        super().__init__(packed, dtype)
        self.bias = bias

    @property
    def weight(self) -> Tensor:
        """The unpacked weight, for code that uses parts of it (absorbed latent attention)."""
        return self.packed.unpack(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) -> (..., out)."""
        return multiply(x, self.packed, self.bias)


class PackedTable(PackedMatrix):
    """An embedding table with packed rows, each unpacked when it is looked up."""

    @property
    def weight(self) -> "PackedTable":
        """The table itself: a tied logit head receives it in place of a plain weight."""
        return self

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up token ids (...) and return their rows (..., D)."""
        return unpack(self.packed.rows(tokens.flatten()), self.dtype).unflatten(0, tokens.shape)


class PackedMixture(MixtureLayer):
    """A mixture of experts with packed weights; a packed matrix stacks the rows of all experts."""

    def __init__(self, layer: MixtureLayer):
        """Share the modules and weights of `layer`; `set_packed` then replaces the weights one at a time."""
        nn.Module.__init__(self)
        self.config, self.activation, self.training = layer.config, layer.activation, layer.training
        self.router, self.shared, self.dropout = layer.router, layer.shared, layer.dropout
        self.gate, self.up, self.down = layer.gate, layer.up, layer.down
        self.gate_bias, self.up_bias, self.down_bias = layer.gate_bias, layer.up_bias, layer.down_bias
        self.shared_gate = layer.shared_gate

    def set_packed(self, name: str, packed: PackedWeight, dtype: torch.dtype) -> None:
        """Replace the weight `name` (one of EXPERT_WEIGHTS) by its packed form."""
        delattr(self, name)  # a module cannot be registered under the name of a parameter
        setattr(self, name, PackedMatrix(packed, dtype))

    def multiply(self, x: Tensor, experts: PackedMatrix, expert: int) -> Tensor:  # type: ignore[override]
        """Multiply x (tokens, in) with the weight of one expert: (tokens, out)."""
        rows_per_expert = len(experts.quants) // self.config.num_experts
        return multiply(x, experts.packed.rows(slice(expert * rows_per_expert, (expert + 1) * rows_per_expert)))


class AcceleratedHead(nn.Module):
    """A logit head that multiplies in the CPU kernels, with a weight of its own or the tied token table."""

    config: Head
    transform: nn.Module
    bias: nn.Parameter | None

    def __init__(self, head: "LogitHead | AcceleratedHead", weight: nn.Parameter | PackedMatrix | None):
        super().__init__()
        self.config, self.transform, self.weight, self.bias = head.config, head.transform, weight, head.bias
        self.training = head.training

    def forward(self, x: Tensor, table: Tensor | PackedMatrix) -> Tensor:
        """Return the logits (..., V) of hidden states (..., D). A tied head multiplies with `table`."""
        x = self.transform(x)
        if self.config.scale != 1.0:
            x = x * self.config.scale
        weight = table if self.weight is None else self.weight
        logits = multiply(x, weight.packed if isinstance(weight, PackedMatrix) else weight, self.bias)
        return apply_softcap(logits, self.config.softcap)


def pack_network(network: Transformer, bits: Bits) -> Transformer:
    """Pack all weights of a network in place and return it.

    Weights are packed one at a time, so that the peak memory is that of the network and one packed weight. The memory
    that this frees is returned to the system, unless somebody else still holds the full weights.
    """
    if is_packed(network):
        raise ClearheadError("the weights are already packed; load the model with full weights to pack them again")
    for name in [name for name, _ in network.named_parameters()]:
        if is_packable(network, name):
            weight = network.get_parameter(name).detach()
            set_packed_weight(network, name, pack_parameter(network.config, name, weight, bits), weight.dtype)
            del weight
    return_freed_memory()
    return network


def is_packable(network: Transformer, name: str) -> bool:
    """Return whether a parameter has a packed form: weights of linear layers, experts, token tables and the head."""
    owner_name, _, attribute = name.rpartition(".")
    owner = network.get_submodule(owner_name)
    if isinstance(owner, MixtureLayer):
        return attribute in EXPERT_WEIGHTS
    if isinstance(owner, nn.Embedding):
        return any(getattr(stack.embedding, "tokens", None) is owner for stack in _stacks(network))
    return attribute == "weight" and isinstance(owner, nn.Linear | LogitHead | AcceleratedHead)


def set_packed_weight(network: Transformer, name: str, packed: PackedWeight, dtype: torch.dtype) -> None:
    """Replace the module that owns a packable parameter by one that computes with the packed weight.

    `dtype` is the precision of its outputs. The full parameter is not read and may be on the meta device. The names of
    the other parameters stay valid.
    """
    owner_name, _, attribute = name.rpartition(".")
    owner = network.get_submodule(owner_name)
    if isinstance(owner, nn.Linear):
        network.set_submodule(owner_name, PackedLinear(packed, owner.bias, dtype))
    elif isinstance(owner, MixtureLayer):
        mixture = owner if isinstance(owner, PackedMixture) else PackedMixture(owner)
        mixture.set_packed(attribute, packed, dtype)
        network.set_submodule(owner_name, mixture)
    elif isinstance(owner, nn.Embedding):
        _set_packed_table(network, owner, PackedTable(packed, dtype))
    else:
        assert isinstance(owner, LogitHead | AcceleratedHead)
        network.head = AcceleratedHead(owner, PackedMatrix(packed, dtype))  # type: ignore[assignment]


def _stacks(network: Transformer) -> list[LayerStack]:
    return [stack for stack in (network.encoder, network.decoder) if stack is not None]


def _set_packed_table(network: Transformer, table: nn.Embedding, packed: PackedTable) -> None:
    """Replace a token table wherever it is used: encoder and decoder may share it, and the head may be tied to it."""
    for stack in _stacks(network):
        if getattr(stack.embedding, "tokens", None) is table:
            stack.embedding.tokens = packed
    head: nn.Module | None = network.head
    if isinstance(head, LogitHead) and head.weight is None:
        network.head = AcceleratedHead(head, None)  # type: ignore[assignment]


def is_packed(network: nn.Module) -> bool:
    """Return whether any weight of the network is packed."""
    return any(isinstance(module, PackedMatrix) for module in network.modules())
