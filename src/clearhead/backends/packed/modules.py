"""The network's own modules with packed weights, and the exchange of one for the other: works for every family.

    pack_network(network, "int4")

Linear layers, experts, the token table and the logit head are packed; norms, biases, positions and routers stay as they
are.
"""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from clearhead.backends.cpu import library as cpu
from clearhead.backends.packed.formats import Bits, Packed, pack
from clearhead.errors import ClearheadError
from clearhead.model import LogitHead, MixtureLayer, Transformer, softcap_scores


class PackedMatrix(nn.Module):
    """Holds a packed weight as buffers, so that it moves with the network; `dtype` is that of its numbers."""

    quants: Tensor
    scales: Tensor
    offsets: Tensor | None

    def __init__(self, packed: Packed, dtype: torch.dtype):
        super().__init__()
        self.columns, self.dtype = packed.columns, dtype
        self.put(packed)

    def put(self, packed: Packed) -> None:
        self.register_buffer("quants", packed.quants)
        self.register_buffer("scales", packed.scales)
        self.register_buffer("offsets", packed.offsets)

    @property
    def packed(self) -> Packed:
        return Packed(self.quants, self.scales, self.offsets, self.columns)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """A change of precision is none of the scales': as bits they come through it unrounded."""
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.scales.device)).dtype
        self.view_scales(torch.int16)
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:  # where a device has too little memory, this one goes on
            self.view_scales(torch.float16)
        return self

    def view_scales(self, dtype: torch.dtype) -> None:
        self.scales = self.scales.view(dtype)
        self.offsets = None if self.offsets is None else self.offsets.view(dtype)


class PackedLinear(PackedMatrix):
    def __init__(self, packed: Packed, bias: nn.Parameter | None, dtype: torch.dtype):
        super().__init__(packed, dtype)
        self.bias = bias

    @property
    def weight(self) -> Tensor:
        """As numbers, for what does not multiply by it whole (absorbed latent attention)."""
        return self.packed.unpack(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return cpu.multiply(x, self.packed, self.bias)


class PackedTable(PackedMatrix):
    """An embedding table; a row is unpacked when it is looked up."""

    @property
    def weight(self) -> "PackedTable":
        """What a tied head is handed."""
        return self

    def forward(self, tokens: Tensor) -> Tensor:
        return cpu.unpacked(self.packed.rows(tokens.flatten()), self.dtype).unflatten(0, tokens.shape)


class PackedMixture(MixtureLayer):
    """The same experts, one below the other in each packed matrix."""

    def __init__(self, layer: MixtureLayer, bits: Bits):
        nn.Module.__init__(self)
        self.config, self.activation, self.training = layer.config, layer.activation, layer.training
        self.router, self.shared, self.dropout = layer.router, layer.shared, layer.dropout
        for name in ("gate", "up", "down"):
            weight = getattr(layer, name)
            setattr(self, name, None if weight is None else PackedMatrix(pack(weight.detach(), bits), weight.dtype))

    def multiply(self, x: Tensor, experts: PackedMatrix, expert: int) -> Tensor:  # type: ignore[override]
        height = len(experts.quants) // self.config.num_experts
        return cpu.multiply(x, experts.packed.rows(slice(expert * height, (expert + 1) * height)))


class AcceleratedHead(nn.Module):
    """A logit head for few rows: its own matrix or the token table, plain or packed."""

    def __init__(self, head: LogitHead, own: nn.Parameter | PackedMatrix | None):
        super().__init__()
        self.config, self.transform, self.weight, self.bias = head.config, head.transform, own, head.bias
        self.training = head.training

    def forward(self, x: Tensor, table: Tensor | PackedMatrix) -> Tensor:
        x = self.transform(x)
        if self.config.scale != 1.0:
            x = x * self.config.scale
        weight = table if self.weight is None else self.weight
        logits = cpu.multiply(x, weight.packed if isinstance(weight, PackedMatrix) else weight, self.bias)
        return softcap_scores(logits, self.config.softcap)


def pack_network(network: Transformer, bits: Bits) -> Transformer:
    """In place. One module at a time, so that the peak is the network and one packed module more."""
    if is_packed(network):
        raise ClearheadError("these weights are packed already; load the model with full weights to pack them anew")
    for name in [name for name, _ in network.named_modules()]:  # the modules in a list would all stay until its end
        module = network.get_submodule(name)
        if isinstance(module, nn.Linear):
            weight = module.weight.detach()
            network.set_submodule(name, PackedLinear(pack(weight, bits), module.bias, weight.dtype))
        elif isinstance(module, MixtureLayer):
            network.set_submodule(name, PackedMixture(module, bits))
    tables: dict[nn.Embedding, PackedTable] = {}
    for stack in (network.encoder, network.decoder):
        if stack is None:
            continue
        table = stack.embedding.tokens
        if table not in tables:
            tables[table] = PackedTable(pack(table.weight.detach(), bits), table.weight.dtype)
        stack.embedding.tokens = tables[table]  # type: ignore[assignment]
    if network.head is not None:
        own = network.head.weight
        packed = None if own is None else PackedMatrix(pack(own.detach(), bits), own.dtype)
        network.head = AcceleratedHead(network.head, packed)  # type: ignore[assignment]
    return network


def is_packed(network: nn.Module) -> bool:
    return any(isinstance(module, PackedMatrix) for module in network.modules())
