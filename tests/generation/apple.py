"""A simulated Apple GPU: its tensors report the device `mps`, have no float64 and cannot be mixed with others.

with AppleGpu(): torch.ones(2, device="mps").double()    # TypeError, as on the real device
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE_FUNCTIONS = (torch.device, torch._C._nn._parse_to)  # they name a device and create no tensor
CHECKED_FUNCTIONS = (  # they check that the device exists before they dispatch
    Tensor.__getitem__,
    Tensor.__setitem__,
    Tensor.__float__,
    Tensor.__int__,
    Tensor.item,
    Tensor.tolist,
    torch.where,
    scaled_dot_product_attention,
)


class AppleTensor(Tensor):
    """A tensor whose data is on the CPU."""

    @staticmethod
    def __new__(cls, data):
        if data.dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64")
        layout = data.shape, data.stride(), data.storage_offset()
        tensor = Tensor._make_wrapper_subclass(cls, *layout, dtype=data.dtype, device=torch.device("mps", 0))
        tensor.cpu_data = data
        return tensor

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return compute_on_cpu(function, args, kwargs or {})


class AppleGpu(TorchFunctionMode):
    """Within this context, device="mps" creates AppleTensors."""

    def __enter__(self):
        # so that module.to("mps") accepts such tensors
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        return super().__enter__()

    def __exit__(self, *error):
        torch.__future__.set_overwrite_module_params_on_conversion(False)
        super().__exit__(*error)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in DEVICE_FUNCTIONS:
            return function(*args, **kwargs)
        if function in CHECKED_FUNCTIONS or any(is_apple(leaf) for leaf in tree_leaves((args, kwargs))):
            return compute_on_cpu(function, args, kwargs)
        return function(*args, **kwargs)


def compute_on_cpu(function, args, kwargs):
    """Compute on the CPU. The result is on the device that the call names, or else on that of its tensors."""
    leaves = tree_leaves((args, kwargs))
    apple = [isinstance(leaf, AppleTensor) for leaf in leaves if isinstance(leaf, Tensor)]
    to_cpu = any(leaf == torch.device("cpu") for leaf in leaves if isinstance(leaf, torch.device))
    to_apple = any(is_apple(leaf) for leaf in leaves)
    kinds = {isinstance(leaf, AppleTensor) for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim > 0}
    if len(kinds) == 2 and not (to_cpu or to_apple):
        raise RuntimeError(f"{function} of tensors on mps and on cpu")
    result = function(*tree_map(to_cpu_tensor, args), **tree_map(to_cpu_tensor, kwargs))
    if to_cpu or not (to_apple or any(apple)):
        return result
    return tree_map(lambda leaf: AppleTensor(leaf) if isinstance(leaf, Tensor) else leaf, result)


def is_apple(leaf):
    return leaf == "mps" if isinstance(leaf, str) else isinstance(leaf, torch.device) and leaf.type == "mps"


def to_cpu_tensor(leaf):
    if isinstance(leaf, AppleTensor):
        return leaf.cpu_data
    return torch.device("cpu") if is_apple(leaf) else leaf
