"""Compile the kernels of products, unpacking, embedding and sampling for a Hopper GPU, which needs no GPU.

    python -m tests.backends.cuda.compiled_products

Triton's interpreter runs kernels as Python, so it accepts what the compiler refuses.
"""

from itertools import product

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from clearhead.backends.cuda.triton_candidates import check_candidates
from clearhead.backends.cuda.triton_embedding import embed_packed, embed_plain
from clearhead.backends.cuda.triton_products import multiply_packed_row, multiply_row
from clearhead.backends.cuda.triton_sampling import (
    add_noise_to_candidates,
    choose_tokens,
    draw_candidates,
    scan_logits,
)
from clearhead.backends.cuda.triton_unpacking import unpack_rows

HOPPER = GPUTarget("cuda", 90, 32)
VECTORS = dict.fromkeys(("y", "x", "gain", "shift", "bias", "residual"), "*bf16") | {"N": "i32", "epsilon": "fp32"}
PACKED = {"quants": "*i32", "scales": "*fp16", "offsets": "*fp16", "group_scales": "*i8", "group_offsets": "*i8"}
SEATS = {"positions": "*i64", "seats": "*i32", "columns": "*i64", "num_seats": "i32", "table": "*bf16", "scale": "fp32"}
SAMPLING = {
    **dict.fromkeys(("logits", "numbers", "bias", "maxima", "sums", "masses", "candidate_values"), "*fp32"),
    **dict.fromkeys(("seats", "counts", "places", "ranks", "num_candidates", "candidate_places"), "*i32"),
    "candidates": "*fp64",
    "integers": "*i64",
    "chosen": "*i64",
    "num_seats": "i32",
}
SETTINGS = {"K": 1024, "UNIT_OFFSET": False, "NORM_BIAS": False, "BIAS": False, "BLOCK_N": 2, "PDL": True}


def compile_kernel(kernel, types, settings) -> None:
    """Compile a kernel with these types of its arguments; all others are constants."""
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    constants = {name: settings[name] for name in kernel.arg_names if name not in types}
    triton.compile(ASTSource(kernel, signature=signature, constexprs=constants), target=HOPPER)


def main() -> None:
    gated = {"GATED": True, "ACTIVATION": "silu", "NORM": "rms", "RESIDUAL": False}
    added = {"GATED": False, "ACTIVATION": "", "NORM": "", "RESIDUAL": True}
    for branch, block in product((gated, added), (256, 512, 1024)):
        compile_kernel(multiply_row, VECTORS | {"weight": "*bf16"}, SETTINGS | branch | {"BLOCK_K": block})
    formats_of_kernels = [(4, 1, 0), (4, 1, 1), (4, 2, 1), (4, 3, 0), (4, 3, 2)]
    formats_of_kernels += [(8, 1, 0), (8, 1, 1), (8, 3, 0), (8, 3, 1), (8, 3, 2)]
    for branch, (bits, levels, offsets) in product((gated, added), formats_of_kernels):
        formats = {"GROUPS": 32, "BLOCK_G": 32, "BITS": bits, "LEVELS": levels, "OFFSETS": offsets, "DP4A": True}
        compile_kernel(multiply_packed_row, VECTORS | PACKED, SETTINGS | branch | formats)
        compile_kernel(unpack_rows, VECTORS | PACKED, SETTINGS | formats)
        compile_kernel(embed_packed, VECTORS | PACKED | SEATS, SETTINGS | formats | {"SCALED": True})
    compile_kernel(embed_plain, VECTORS | SEATS, SETTINGS | {"BLOCK_K": 1024, "SCALED": True})
    sampling = {
        "V": 3000,
        "ADJUST": True,
        "CHUNK": 1024,
        "CHUNKS": 3,
        "BLOCK_C": 4,
        "BLOCK": 512,
        "MAX": 64,
        "PDL": True,
    }
    for kernel in (scan_logits, draw_candidates, add_noise_to_candidates, check_candidates, choose_tokens):
        compile_kernel(kernel, SAMPLING, sampling)


if __name__ == "__main__":
    main()
