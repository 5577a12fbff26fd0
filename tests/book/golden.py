"""Numbers of the book's worked examples, as float64 tensors.

weights = golden("qkv", "weights")
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NUMBERS = json.loads(Path(__file__).with_name("golden.json").read_text())


def golden(*keys: str) -> Tensor:
    """Return the numbers under these keys of golden.json as a tensor."""
    return torch.tensor(to_floats(golden_value(*keys)), dtype=torch.float64)


def golden_value(*keys: str) -> Any:
    """Return the value under these keys of golden.json."""
    value = NUMBERS
    for key in keys:
        value = value[key]
    return value


def to_floats(value: Any) -> Any:
    """Convert nested lists to floats. JSON has no infinity, so it is written as "-inf"."""
    return [to_floats(item) for item in value] if isinstance(value, list) else float(value)
