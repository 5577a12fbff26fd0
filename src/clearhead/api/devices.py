"""Dtypes and devices by name.

dtype = resolve_dtype("bfloat16"); device = resolve_device("cuda:0", dtype)
"""

import torch

from clearhead.errors import ClearheadError, unknown_name

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def resolve_device(device: torch.device | str | None, dtype: torch.dtype | None = None) -> torch.device | None:
    """Return the device; raise ClearheadError if it does not exist here or does not support the dtype."""
    if device is None:
        return None
    try:
        torch.empty(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ClearheadError(f"the device {str(device)!r} is not available on this machine; use cpu") from None
    resolved = torch.device(device)
    if resolved.type == "mps" and dtype == torch.float64:
        raise ClearheadError("Apple's GPUs do not support float64; use float32, or the device cpu")
    return resolved


def resolve_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return the torch dtype of a name; raise ClearheadError unless it is one of DTYPES."""
    name = str(dtype).removeprefix("torch.")
    if dtype is not None and name not in DTYPES:
        raise unknown_name("dtype", name, DTYPES)
    return DTYPES.get(name)
