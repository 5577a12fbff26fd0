"""Matrix products and unpacking in the C++ kernels against PyTorch, for every format and size of a weight."""

import platform
from ctypes import byref

import pytest
import torch
from torch.nn import functional

from clearhead.backends.cpu_kernels import ACTIVATION_CODES, NormStruct, describe_matrix, library
from clearhead.backends.cpu_kernels.products import multiply_in_kernel, unpack
from clearhead.backends.packed import pack, pack_gguf_blocks

pytestmark = pytest.mark.usefixtures("kernels", "seed")


@pytest.fixture
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("shape", [(960, 576), (576, 1536), (100, 96), (7, 40), (1, 64), (67, 130), (33, 45)])
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 70])
def test_products_of_all_weight_formats(shape, rows):
    weight, x, bias = torch.randn(shape) * 0.05, torch.randn(rows, shape[1]), torch.randn(shape[0])
    formats = {
        "float32": weight,
        "bfloat16": weight.bfloat16(),
        "int8": pack(weight, "int8"),
        "int4": pack(weight, "int4"),
    }
    for name, stored in formats.items():
        plain = stored.float() if isinstance(stored, torch.Tensor) else stored.unpack()
        expected, found = functional.linear(x, plain, bias), multiply_in_kernel(x, stored, bias)
        error = (found - expected).norm() / expected.norm()
        assert error < {"float32": 1e-6, "bfloat16": 4e-3}.get(name, 1e-2), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 31, 32, 33, 130])
def test_plain_products_of_every_size(dtype, columns):
    """Whole tiles and what is left over. x is rounded like W, so only the order of the sums, along K, may differ."""
    for rows in (*range(1, 20), 23, 32, 47, 48, 49, 55, 64, 130):
        for height in (1, 3, 4, 6, 33, 70):
            weight, x, bias = torch.randn(height, columns).to(dtype), torch.randn(rows, columns), torch.randn(height)
            expected = functional.linear(x.to(dtype).double(), weight.double(), bias.double())
            error = (multiply_in_kernel(x, weight, bias) - expected).abs().max()
            assert error < 5e-5, (rows, height)


def gated_product(x, weight, bias):
    """Return silu(x Gᵀ + b) (x Uᵀ + c); the rows of weight (2 N, K) are those of G, then those of U."""
    x, y = x.contiguous(), torch.empty(len(x), len(weight) // 2)
    matrix, kernels = describe_matrix(weight, bias), library.load_kernel_library()
    silu = ACTIVATION_CODES["silu"]
    kernels.clearhead_linear(y.data_ptr(), x.data_ptr(), len(x), byref(matrix), byref(NormStruct()), silu, 1, None)
    return y


# x is transposed, or W is: because ten rows of x or more would be missing in its last panel of 32, or x is too long.
SIZES_OF_X = [(9, 96), (22, 96), (23, 96), (33, 96), (55, 130), (256, 576), (250, 1700)]


@pytest.mark.parametrize(("rows", "columns"), SIZES_OF_X)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_x_gets_the_same_bits_alone_and_among_others(dtype, rows, columns):
    if not library.kernels_support_prompts():
        pytest.skip("only with AVX-512 do the bits of a row not depend on the number of rows")
    x, weight, bias = torch.randn(rows, columns), torch.randn(2 * 70, columns).to(dtype), torch.randn(2 * 70)
    gate, up = functional.linear(x.to(dtype).double(), weight.double(), bias.double()).chunk(2, dim=1)
    for product, exact in ((multiply_in_kernel, torch.cat([gate, up], 1)), (gated_product, functional.silu(gate) * up)):
        together = product(x, weight, bias)
        torch.testing.assert_close(together.double(), exact, atol=1e-2, rtol=1e-3)
        assert torch.equal(together, torch.cat([product(row, weight, bias) for row in x.split(1)]))


@pytest.mark.parametrize("rows", [1, 2, 20, 60])
def test_a_large_bias_is_added_once(rows):
    """Marian masks padding with a bias of -10,000: products added to it one by one would lose several units."""
    weight, x, bias = torch.randn(9, 512), torch.randn(rows, 512), torch.full((9,), -1e4)
    exact = functional.linear(x.double(), weight.double(), bias.double())
    error = (multiply_in_kernel(x, weight, bias) - exact).abs().max()
    assert error < 0.6 * 2**-10  # half a unit in the last place, and the rounding of the sum


@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_packed_products_round_only_x(bits, rows):
    """x is rounded to eight bits with a scale per group of 32; apart from that, the product is exact."""
    packed, x = pack(torch.randn(200, 576) * 0.05, bits), torch.randn(rows, 576)
    x[:, 5] *= 40
    groups = x.double().view(rows, -1, 32)
    scales = groups.abs().amax(dim=-1, keepdim=True) / 127
    expected = ((groups / scales).round() * scales).view(rows, -1) @ packed.unpack().double().T
    assert (multiply_in_kernel(x, packed) - expected).norm() / expected.norm() < 1e-6


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors only have the plain loops")
def test_the_plain_loops_compute_the_same_as_avx512(plain_library, monkeypatch):
    x, weight = torch.randn(50, 131), torch.randn(67, 131)
    formats = [weight, weight.bfloat16(), pack(weight, "int8"), pack(weight, "int4")]

    def products_of(stored):
        return torch.cat([multiply_in_kernel(x[:rows], stored) for rows in (1, 2, 5, 17, 50)])

    vectorized = [products_of(stored) for stored in formats]
    monkeypatch.setattr(library, "_loaded", plain_library)
    for stored, expected in zip(formats, vectorized, strict=True):
        torch.testing.assert_close(products_of(stored), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("rows", [1, 20])
def test_nan_and_infinity_in_x_are_not_rounded_to_numbers(bits, wrong, rows):
    x = torch.randn(rows, 96)
    x[0, 70] = wrong
    finite = multiply_in_kernel(x, pack(torch.randn(5, 96), bits)).isfinite()
    assert not finite[0].any()
    assert finite[1:].all()


def test_multiplying_an_empty_batch_returns_an_empty_batch():
    for weight in (torch.randn(7, 64), pack(torch.randn(7, 64), "int8")):
        assert multiply_in_kernel(torch.empty(2, 0, 64), weight).shape == (2, 0, 7)


def test_a_weight_may_be_a_transposed_view_and_must_have_the_width_of_x():
    weight, x = torch.randn(40, 30).t(), torch.randn(1, 40)
    torch.testing.assert_close(multiply_in_kernel(x, weight), functional.linear(x, weight), atol=1e-5, rtol=1e-5)
    with pytest.raises(AssertionError):
        multiply_in_kernel(torch.randn(1, 39), weight)


def test_products_with_the_offsets_of_q4_1():
    quants = pytest.importorskip("gguf").quants
    block_type = pytest.importorskip("gguf").GGMLQuantizationType.Q4_1
    weight = torch.rand(50, 192) + 0.5
    blocks = torch.from_numpy(quants.quantize(weight.numpy(), block_type)).view(50 * 6, -1)
    packed = pack_gguf_blocks(blocks, 50, "Q4_1")
    for rows in (2, 20):
        x = torch.randn(rows, 192)
        expected = functional.linear(x, packed.unpack())
        assert (multiply_in_kernel(x, packed) - expected).norm() / expected.norm() < 2e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_unpacking_gives_the_values_of_the_format(bits, dtype):
    packed = pack(torch.randn(33, 70), bits)
    torch.testing.assert_close(unpack(packed, dtype), packed.unpack(dtype), atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(unpack(packed, torch.float32), packed.unpack(), atol=1e-6, rtol=1e-6)
