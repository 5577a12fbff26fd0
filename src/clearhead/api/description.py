"""What repr of a model shows.

describe_network(network, family)["parameters"]; name_execution(network)
"""

from clearhead.backends import (
    AcceleratedStack,
    PackedMatrix,
    find_new_kernels,
    triton_available,
    unsupported_network_reason,
)
from clearhead.families import Family
from clearhead.model import Transformer


def describe_network(network: Transformer, family: Family | None) -> dict[str, str]:
    """Return family, size, precision and device of a network, by name."""
    parameter = next(network.parameters())
    packed = [part.packed for part in network.modules() if isinstance(part, PackedMatrix)]
    count = sum(parameter.numel() for parameter in network.parameters())
    count += sum(rows * columns for rows, columns in (matrix.shape for matrix in packed))
    return {
        "family": family.name if family else "custom",
        "parameters": f"{count:,} parameters",
        "dtype": str(parameter.dtype).removeprefix("torch.") + (" with packed weights" if packed else ""),
        "device": str(parameter.device),
    }


def name_execution(network: Transformer, use_cuda_graph: bool = True) -> str:
    """Name what runs a decode step: PyTorch, the CPU kernels or a CUDA graph."""
    device = next(network.parameters()).device
    if device.type == "cpu" and isinstance(getattr(network, "decoder", None), AcceleratedStack):
        return "PyTorch" if find_new_kernels() is None else "CPU kernels"  # None: they are still being compiled
    if device.type == "cuda" and use_cuda_graph and triton_available(device):
        return "PyTorch" if unsupported_network_reason(network, "paged") else "CUDA graph"
    return "PyTorch"
