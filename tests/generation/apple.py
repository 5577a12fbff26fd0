"""Apple's GPU as far as it can be played: tensors that say they are on `mps`, have no float64 and mix with no others.

with AppleGpu(): torch.ones(2, device="mps").double()    # TypeError, as there
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

ABOUT_DEVICES = (torch.device, torch._C._nn._parse_to)  # they name one and make nothing on it
GUARDED = (  # they look for a real device before any tensor is asked
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
    """Its numbers are on the processor."""

    @staticmethod
    def __new__(cls, numbers):
        if numbers.dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64")
        layout = numbers.shape, numbers.stride(), numbers.storage_offset()
        made = Tensor._make_wrapper_subclass(cls, *layout, dtype=numbers.dtype, device=torch.device("mps", 0))
        made.numbers = numbers
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return computed(function, args, kwargs or {})


class AppleGpu(TorchFunctionMode):
    def __enter__(self):
        torch.__future__.set_overwrite_module_params_on_conversion(True)  # module.to("mps") takes such tensors over
        return super().__enter__()

    def __exit__(self, *error):
        torch.__future__.set_overwrite_module_params_on_conversion(False)
        super().__exit__(*error)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in ABOUT_DEVICES:
            return function(*args, **kwargs)
        if function in GUARDED or any(is_apple(leaf) for leaf in tree_leaves((args, kwargs))):
            return computed(function, args, kwargs)
        return function(*args, **kwargs)


def computed(function, args, kwargs):
    """On the processor; the result is where the call says, or else where its tensors are."""
    given = tree_leaves((args, kwargs))
    ours = [isinstance(leaf, AppleTensor) for leaf in given if isinstance(leaf, Tensor)]
    away = any(leaf == torch.device("cpu") for leaf in given if isinstance(leaf, torch.device))
    here = any(is_apple(leaf) for leaf in given)
    of_some_size = {isinstance(leaf, AppleTensor) for leaf in given if isinstance(leaf, Tensor) and leaf.ndim > 0}
    if len(of_some_size) == 2 and not (away or here):
        raise RuntimeError(f"{function} of tensors on mps and on cpu")
    found = function(*tree_map(on_processor, args), **tree_map(on_processor, kwargs))
    if away or not (here or any(ours)):
        return found
    return tree_map(lambda leaf: AppleTensor(leaf) if isinstance(leaf, Tensor) else leaf, found)


def is_apple(leaf):
    return leaf == "mps" if isinstance(leaf, str) else isinstance(leaf, torch.device) and leaf.type == "mps"


def on_processor(leaf):
    if isinstance(leaf, AppleTensor):
        return leaf.numbers
    return torch.device("cpu") if is_apple(leaf) else leaf
