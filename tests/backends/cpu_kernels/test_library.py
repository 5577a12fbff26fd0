"""The processor's kernels one by one, against PyTorch."""

import platform
from ctypes import byref

import pytest
import torch
from torch.nn import functional

from clearhead.architecture import Rope
from clearhead.backends.cpu_kernels import library as cpu
from clearhead.backends.cpu_kernels.attention import cpu_attention
from clearhead.backends.cpu_kernels.products import multiply_in_kernel, unpack
from clearhead.backends.cpu_kernels.structures import (
    Heads,
    KeyValueView,
    LayerStruct,
    MatrixStruct,
    NormStruct,
    RotationAngles,
)
from clearhead.backends.packed.formats import pack, pack_gguf_blocks
from clearhead.errors import ClearheadError
from clearhead.model.attend import Scoring
from clearhead.model.masks import Mask
from clearhead.model.positions import make_rotation


@pytest.fixture(autouse=True)
def kernels():
    torch.manual_seed(0)
    try:
        return cpu.load_kernel_library(build=True)
    except ClearheadError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("shape", [(960, 576), (576, 1536), (100, 96), (7, 40), (1, 64), (67, 130), (33, 45)])
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 70])
def test_products(shape, rows):
    weight, x, bias = torch.randn(shape) * 0.05, torch.randn(rows, shape[1]), torch.randn(shape[0])
    kinds = {
        "float32": weight,
        "bfloat16": weight.bfloat16(),
        "int8": pack(weight, "int8"),
        "int4": pack(weight, "int4"),
    }
    for name, kind in kinds.items():
        numbers = kind.float() if isinstance(kind, torch.Tensor) else kind.unpack()
        expected, found = functional.linear(x, numbers, bias), multiply_in_kernel(x, kind, bias)
        error = (found - expected).norm() / expected.norm()
        assert error < {"float32": 1e-6, "bfloat16": 4e-3}.get(name, 1e-2), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 31, 32, 33, 130])
def test_plain_products_of_every_size(dtype, columns):
    """In tiles of whole vectors, whatever is left over; x is rounded as W is, so only the sums may differ."""
    for rows in (*range(1, 20), 32, 47, 48, 49, 130):
        for height in (1, 3, 4, 6, 33):
            weight, x, bias = torch.randn(height, columns).to(dtype), torch.randn(rows, columns), torch.randn(height)
            expected = functional.linear(x.to(dtype).double(), weight.double(), bias.double())
            error = (multiply_in_kernel(x, weight, bias) - expected).abs().max()
            assert error < 2e-5, (rows, height)


@pytest.mark.parametrize("rows", [1, 2, 20, 60])
def test_a_large_bias_rounds_once(rows):
    """As the padding of Marian has it, -10,000: sums that were added to it one by one would be off by several units."""
    weight, x, bias = torch.randn(9, 512), torch.randn(rows, 512), torch.full((9,), -1e4)
    exact = functional.linear(x.double(), weight.double(), bias.double())
    assert (
        multiply_in_kernel(x, weight, bias) - exact
    ).abs().max() < 0.6 * 2**-10  # half of a unit, and the rounding of the sum


@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_packed_products_only_round_x(bits, rows):
    """To eight bits under a scale for each group of 32; with x so rounded, the product is exact."""
    packed, x = pack(torch.randn(200, 576) * 0.05, bits), torch.randn(rows, 576)
    x[:, 5] *= 40
    groups = x.double().view(rows, -1, 32)
    scales = groups.abs().amax(dim=-1, keepdim=True) / 127
    expected = ((groups / scales).round() * scales).view(rows, -1) @ packed.unpack().double().T
    assert (multiply_in_kernel(x, packed) - expected).norm() / expected.norm() < 1e-6


@pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere the plain loops are all there is")
def test_the_plain_loops_are_the_vectors(tmp_path, monkeypatch):
    x, weight = torch.randn(50, 131), torch.randn(67, 131)
    kinds = [weight, weight.bfloat16(), pack(weight, "int8"), pack(weight, "int4")]

    def products(kind):
        return torch.cat([multiply_in_kernel(x[:rows], kind) for rows in (1, 2, 5, 17, 50)])

    vectors = [products(kind) for kind in kinds]
    monkeypatch.setattr(cpu, "FLAGS", (*cpu.FLAGS, "-mno-avx512f"))
    cpu.compile_library(tmp_path / "plain.so")
    monkeypatch.setattr(cpu, "_loaded", cpu.open_library(tmp_path / "plain.so"))
    for kind, expected in zip(kinds, vectors, strict=True):
        torch.testing.assert_close(products(kind), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("rows", [1, 20])
def test_what_is_no_number_does_not_become_one(bits, wrong, rows):
    x = torch.randn(rows, 96)
    x[0, 70] = wrong
    finite = multiply_in_kernel(x, pack(torch.randn(5, 96), bits)).isfinite()
    assert not finite[0].any()
    assert finite[1:].all()


def test_no_rows_are_no_rows():
    for weight in (torch.randn(7, 64), pack(torch.randn(7, 64), "int8")):
        assert multiply_in_kernel(torch.empty(2, 0, 64), weight).shape == (2, 0, 7)


def test_a_weight_may_be_a_view_and_must_fit():
    weight, x = torch.randn(40, 30).t(), torch.randn(1, 40)
    torch.testing.assert_close(
        multiply_in_kernel(x, weight), functional.linear(x, weight), atol=1e-5, rtol=1e-5
    )
    with pytest.raises(AssertionError):
        multiply_in_kernel(torch.randn(1, 39), weight)


def test_offsets_of_q4_1():
    quants = pytest.importorskip("gguf").quants
    kind = pytest.importorskip("gguf").GGMLQuantizationType.Q4_1
    weight = torch.rand(50, 192) + 0.5
    packed = pack_gguf_blocks(torch.from_numpy(quants.quantize(weight.numpy(), kind)).view(50 * 6, -1), 50, "Q4_1")
    for rows in (2, 20):
        x = torch.randn(rows, 192)
        expected = functional.linear(x, packed.unpack())
        assert (multiply_in_kernel(x, packed) - expected).norm() / expected.norm() < 2e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_unpacking(bits, dtype):
    packed = pack(torch.randn(33, 70), bits)
    torch.testing.assert_close(unpack(packed, dtype), packed.unpack(dtype), atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(unpack(packed, torch.float32), packed.unpack(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("num_slots", [1, 31, 32, 33, 64, 65, 200, 300, 1000])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 4, 8), (4, 2, 16), (9, 3, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_over_any_number_of_slots(kernels, num_slots, heads, kv_heads, width, dtype):
    batch, capacity = 2, num_slots + 9
    kept = torch.randn(2, batch, kv_heads, capacity, width).to(dtype)
    projected, y = torch.randn(batch, (heads + 2 * kv_heads) * width), torch.empty(batch, heads * width)
    allowed = torch.rand(batch, num_slots) > 0.2
    allowed[:, -1] = True
    cache = KeyValueView(
        kept[0].data_ptr(), kept[1].data_ptr(), *kept.stride()[1:4], num_slots - 1, num_slots,
        allowed.data_ptr(), dtype == torch.bfloat16,
    )  # fmt: skip
    rotation = make_rotation(Rope(), torch.full((1, 1), num_slots - 1), width, torch.float32)
    angles = RotationAngles(rotation.cosine.data_ptr(), rotation.sine.data_ptr(), 0)
    sizes = Heads(heads, kv_heads, width, width // 2, 0, 0.3, NormStruct(), NormStruct())
    q, k, v = projected.split([heads * width, kv_heads * width, kv_heads * width], dim=1)
    expected = kept.clone()
    expected[0, :, :, num_slots - 1] = rotation.rotate(k.view(batch, kv_heads, 1, width))[:, :, 0]
    expected[1, :, :, num_slots - 1] = v.view(batch, kv_heads, width)
    kernels.clearhead_attend_token(
        y.data_ptr(), projected.data_ptr(), batch, byref(sizes), byref(cache), byref(angles), 0
    )
    torch.testing.assert_close(kept[:, :, :, :num_slots], expected[:, :, :, :num_slots], atol=1e-2, rtol=1e-2)
    seen = expected[:, :, :, :num_slots].float()
    reference = functional.scaled_dot_product_attention(
        rotation.rotate(q.view(batch, heads, 1, width)),
        seen[0],
        seen[1],
        allowed[:, None, None],
        scale=0.3,
        enable_gqa=True,
    )
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(y, reference.transpose(1, 2).flatten(1), atol=tolerance, rtol=tolerance)


def test_without_enough_memory_a_kernel_says_so(kernels):
    far_more = 2**50  # rows or slots: no process can address them
    heads, kept, norm = byref(Heads(1, 1, 64)), byref(KeyValueView(num_slots=far_more)), byref(NormStruct())
    wide = MatrixStruct(num_rows=64, num_columns=64)
    layers = (LayerStruct * 1)(LayerStruct(query_key_value=wide, attention_output=wide, gate_and_up=wide, down=wide))
    calls = [
        (kernels.clearhead_run_layers, layers, 1, KeyValueView(), None, RotationAngles(), norm, None, far_more, 1),
        (kernels.clearhead_linear, None, None, far_more, byref(wide), norm, 0, 0, None),
        (kernels.clearhead_attend_token, None, None, 1, heads, kept, byref(RotationAngles()), 0),
        (kernels.clearhead_attend_prompt, None, None, 1, 1, heads, kept, 0),
    ]
    for kernel, *given in calls:
        with pytest.raises(MemoryError, match="not enough memory"):
            kernel(*given)


def test_older_kernels_are_removed(tmp_path):
    names = ["step-a-1.so", "step-a-2.so", "step-b-1.so", "other.so"]
    for name in names:
        (tmp_path / name).touch()
    cpu.remove_older_builds(tmp_path / "step-a-2.so")
    assert {path.name for path in tmp_path.iterdir()} == {"step-a-2.so", "step-b-1.so", "other.so"}


def test_the_default_dtype_of_torch_is_not_the_kernels_business():
    x, weight = torch.randn(3, 64), torch.randn(7, 64)
    q, k, v = (torch.randn(1, 2, 5, 16) for _ in range(3))
    how = Scoring(mask=Mask(causal=True), scale=0.25)
    expected = multiply_in_kernel(x, weight), cpu_attention(q, k, v, how)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            found = multiply_in_kernel(x, weight), cpu_attention(q, k, v, how)
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
