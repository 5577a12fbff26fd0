"""C++ kernels for CPUs, and their binding to Python. This package imports only the storage formats of packed/.

library      load the compiled kernels with ctypes
compiling    compile them once per machine, here or in another process
structures   ctypes mirrors of the C++ structures
matrices     plain and packed weights as such structures
products     y = W x + bias for a plain or a packed weight
attention    attention over a whole prompt
source/      the C++ code: kernels.cpp and its headers
"""

from clearhead.backends.cpu_kernels.attention import cpu_attention
from clearhead.backends.cpu_kernels.library import (
    build_in_background,
    find_new_kernels,
    is_inference,
    kernels_support_prompts,
    load_kernel_library,
)
from clearhead.backends.cpu_kernels.matrices import describe_matrix, describe_parts
from clearhead.backends.cpu_kernels.products import multiply, unpack
from clearhead.backends.cpu_kernels.structures import (
    ACTIVATION_CODES,
    NORM_CODES,
    PLACEMENT_CODES,
    ActivationStruct,
    Heads,
    KeyValueView,
    LatentStruct,
    LayerStruct,
    MatrixStruct,
    MixtureStruct,
    NormStruct,
    PackedBatchStruct,
    PageView,
    RotationAngles,
)

__all__ = [
    "ACTIVATION_CODES",
    "NORM_CODES",
    "PLACEMENT_CODES",
    "ActivationStruct",
    "Heads",
    "KeyValueView",
    "LatentStruct",
    "LayerStruct",
    "MatrixStruct",
    "MixtureStruct",
    "NormStruct",
    "PackedBatchStruct",
    "PageView",
    "RotationAngles",
    "build_in_background",
    "cpu_attention",
    "describe_matrix",
    "describe_parts",
    "find_new_kernels",
    "is_inference",
    "kernels_support_prompts",
    "load_kernel_library",
    "multiply",
    "unpack",
]
