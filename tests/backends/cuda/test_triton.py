"""Each Triton kernel against the same formula in PyTorch: on a GPU if there is one, otherwise in the interpreter."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from clearhead.architecture import Embedding, Rope
from clearhead.backends.cuda.launch import packed_arguments, packed_format, unpack
from clearhead.backends.cuda.paged_launch import embed_seats
from clearhead.backends.cuda.seats import Seats
from clearhead.backends.modules import PackedTable
from clearhead.backends.packed import PackedWeight, is_consistent, pack, widen, widen_all
from clearhead.checkpoint.gguf_packing import pack_blocks
from clearhead.model import TokenEmbedding
from clearhead.model.attend import Scoring, reference_attention
from clearhead.model.masks import Mask
from clearhead.model.norms import root_mean_square
from clearhead.model.positions import make_rotation
from tests.checkpoint.random_blocks import BY_NAME, weight_blocks

pytest.importorskip("triton", reason="Triton is not installed")
from clearhead.backends.cuda import triton_attention as kernels
from clearhead.backends.cuda import triton_products as products

ON_GPU = torch.cuda.is_available()

DEVICE = "cuda" if ON_GPU else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def randn(*shape):
    return torch.randn(*shape, device=DEVICE)


def multiply(
    x, weight, *, kind="rms", norm=None, shift=None, bias=None, residual=None, gated=False, activation="", unit=False
):
    """Call a kernel as launch.fused_linear does, but with small tiles."""
    num_outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    y = torch.empty(num_outputs, device=DEVICE)
    arguments = *(x if part is None else part for part in (norm, shift, bias, residual)), num_outputs, 1e-5
    options = {
        "K": weight.shape[1], "NORM": "" if norm is None else kind, "UNIT_OFFSET": unit, "NORM_BIAS": shift is not None,
        "GATED": gated, "ACTIVATION": activation, "BIAS": bias is not None, "RESIDUAL": residual is not None,
        "BLOCK_N": 4, "PDL": False,
    }  # fmt: skip
    grid = (-(-num_outputs // 4),)
    if isinstance(weight, PackedWeight):
        products.multiply_packed_row[2,](
            y, x, *packed_arguments(weight), *arguments, BLOCK_G=16, DP4A=ON_GPU, **packed_format(weight), **options
        )
    else:
        products.multiply_row[grid](y, x, weight, *arguments, **options, BLOCK_K=32)
    return y


@pytest.mark.parametrize("columns", [32, 96, 70])
def test_product_with_rms_norm_bias_and_residual(columns):
    x, weight, norm, bias, residual = randn(columns), randn(10, columns), randn(columns), randn(10), randn(10)
    expected = residual + bias + weight @ (root_mean_square(x, 1e-5) * norm)
    torch.testing.assert_close(multiply(x, weight, norm=norm, bias=bias, residual=residual), expected)


def test_product_with_a_norm_weight_stored_as_its_distance_from_one():
    x, weight, norm = randn(64), randn(8, 64), randn(64)
    expected = weight @ (root_mean_square(x, 1e-5) * (1 + norm))
    torch.testing.assert_close(multiply(x, weight, norm=norm, unit=True), expected)


@pytest.mark.parametrize("columns", [32, 70, 1100])
@pytest.mark.parametrize("biased", [True, False])
def test_product_with_layer_norm(columns, biased):
    x, weight, norm, residual = randn(columns), randn(10, columns), randn(columns), randn(10)
    shift = randn(columns) if biased else None
    expected = residual + weight @ functional.layer_norm(x, (columns,), norm, shift)
    found = multiply(x, weight, kind="layer", norm=norm, shift=shift, residual=residual)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [None, "int8", "int4"])
def test_layer_norm_is_exact_for_a_small_deviation_from_a_large_mean(kind):
    """Near 3000, Σx² in float32 cannot distinguish a deviation of 1 from 0, nor can x in eight bits."""
    x, norm, shift = 3000 + randn(96), randn(96), randn(96)
    weight = randn(10, 96) if kind is None else packed_weight(kind, 10, 96)
    exact = functional.layer_norm(x.double(), (96,), norm.double(), shift.double())
    expected = (weight if kind is None else weight.unpack()).double() @ (
        exact if kind is None else round_to_int8(exact)
    )
    found = multiply(x, weight, kind="layer", norm=norm, shift=shift)
    assert (found - expected).norm() < (1e-3 if kind is None else 1e-2) * expected.norm()


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("gelu", functional.gelu),
        ("silu", functional.silu),
        ("relu", functional.relu),
        ("gelu_tanh", lambda x: functional.gelu(x, approximate="tanh")),
    ],
)
def test_gated_product_with_every_activation(name, function):
    x, weight, bias = randn(64), randn(12, 64), randn(12)
    gate, up = (weight @ x + bias).chunk(2)
    torch.testing.assert_close(
        multiply(x, weight, bias=bias, gated=True, activation=name), function(gate) * up, atol=1e-4, rtol=1e-4
    )


BLOCK_TYPES = ("Q4_0", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "Q2_K", "Q3_K", "IQ4_XS", "MXFP4")


def packed_weight(kind, rows, columns, seed=0):
    if kind not in BLOCK_TYPES:
        return pack(randn(rows, columns), kind)
    return widen(pack_blocks(weight_blocks(kind, rows, columns, seed), rows, BY_NAME[kind])).to(DEVICE)


def round_to_int8(x):
    """Round x as the kernel does: groups of 32, each to integers from -127 to 127."""
    groups = functional.pad(x, (0, -len(x) % 32)).view(-1, 32)
    scales = groups.abs().amax(dim=1, keepdim=True) / 127
    return ((groups / scales + 0.5).floor() * scales).flatten()[: len(x)]


@pytest.mark.parametrize("kind", ["int8", "int4", "Q4_0"])
@pytest.mark.parametrize("columns", [64, 128, 160, 320])
def test_packed_product_with_rms_norm_and_residual(kind, columns):
    x, norm, residual, weight = randn(columns), randn(columns), randn(10), packed_weight(kind, 10, columns)
    mean_square = x.square().mean() + 1e-5
    expected = residual + weight.unpack() @ round_to_int8(x * norm) / mean_square.sqrt()
    torch.testing.assert_close(multiply(x, weight, norm=norm, residual=residual), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["int8", "int4", "Q4_0"])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("columns", [64, 96, 320])
def test_packed_product_with_layer_norm(columns, biased, kind):
    x, norm, residual, weight = randn(columns), randn(columns), randn(10), packed_weight(kind, 10, columns)
    shift = randn(columns) if biased else None
    normed = functional.layer_norm(x, (columns,), norm, shift)
    found = multiply(x, weight, kind="layer", norm=norm, shift=shift, residual=residual)
    torch.testing.assert_close(found, residual + weight.unpack() @ round_to_int8(normed), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
@pytest.mark.parametrize("gated", [False, True])
def test_product_with_blocks_of_every_type_that_is_kept(kind, gated):
    x, norm, weight = randn(512), randn(512), packed_weight(kind, 12, 512)
    expected = weight.unpack() @ round_to_int8(x * norm) / (x.square().mean() + 1e-5).sqrt()
    if gated:
        expected = functional.silu(expected[:6]) * expected[6:]
    found = multiply(x, weight, norm=norm, gated=gated, activation="silu" if gated else "")
    assert (found - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize(
    ("kinds", "num_bits"),
    [
        (("Q4_K", "Q5_K", "Q6_K"), 8 + 1 / 2 + 1 / 4 + 1 / 8),
        (("Q2_K", "Q3_K", "Q4_K"), 4 + 1 / 2 + 1 / 2 + 1 / 8),
        (("Q2_K", "Q3_K", "Q5_K"), 8 + 1 / 2 + 1 / 2 + 1 / 8),
        (("Q3_K", "IQ4_XS", "Q6_K"), 8 + 1 / 2 + 1 / 4 + 1 / 8),
    ],
)
def test_weights_of_different_formats_are_multiplied_as_rows_of_one(kinds, num_bits):
    weights, x = [packed_weight(kind, 12, 512) for kind in kinds], randn(512)
    wide = widen_all(weights)
    assert len({weight.format for weight in wide}) == 1
    for weight, same in zip(weights, wide, strict=True):
        assert is_consistent(same)
        assert same.num_bytes * 8 == 12 * 512 * num_bits
        assert torch.equal(same.unpack(), weight.unpack())
        assert torch.equal(unpack(same, torch.float32), unpack(weight, torch.float32))
        torch.testing.assert_close(multiply(x, same), multiply(x, weight), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["int8", "int4", *BLOCK_TYPES])
def test_unpacked_weights_equal_those_of_the_formula(kind, dtype):
    weight = packed_weight(kind, 11, 512 if kind in BLOCK_TYPES else 1070)  # the latter are padded to 1,088
    found, expected = unpack(weight, dtype), weight.unpack(dtype)
    if dtype == torch.float32:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    else:  # the interpreter cuts off what does not fit, where a GPU rounds
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if ON_GPU else [torch.float32])
@pytest.mark.parametrize("scale", [1.0, 3072**0.5])
@pytest.mark.parametrize("kind", [None, "int8", "int4", *BLOCK_TYPES])
def test_embeddings_of_seats_are_bitwise_those_of_the_module(kind, scale, dtype):
    """The last row has no seat, and gets token 0 at position 0; the interpreter does not round to bfloat16."""
    columns = 1536 if kind in BLOCK_TYPES else 1070  # the latter are padded to 1,088
    table = randn(11, columns).to(dtype) if kind is None else packed_weight(kind, 11, columns)
    embedding = TokenEmbedding(Embedding(vocab_size=11, scale=scale), columns, dropout=0.0)
    embedding.tokens = nn.Embedding.from_pretrained(table) if kind is None else PackedTable(table, dtype)
    seats = Seats(4, 1, 11, torch.device(DEVICE))
    seats.token.copy_(torch.tensor([3, 10, 7, 1]))
    seats.position.copy_(torch.tensor([5, 6, 900, 8]))
    seats.activate([2, 0], 3)
    x, positions = embed_seats(embedding.tokens, scale, seats, 3)
    assert positions.tolist() == [900, 5, 0]
    assert torch.equal(x, embedding(torch.tensor([[7, 3, 0]], device=DEVICE), positions[None])[0])


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_packed_gated_product(kind):
    x, weight, bias = randn(70), packed_weight(kind, 12, 70), randn(12)  # rows of 70 are padded to 128
    gate, up = (weight.unpack() @ round_to_int8(x) + bias).chunk(2)
    found = multiply(x, weight, bias=bias, gated=True, activation="silu")
    torch.testing.assert_close(found, functional.silu(gate) * up, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("num_spans", "window", "has_norms"), [(1, 99, False), (3, 99, False), (1, 40, True), (3, 7, True)]
)
@pytest.mark.parametrize("pairing", ["half", "interleaved", None])
def test_attention_of_one_new_token_against_the_reference(pairing, num_spans, window, has_norms):
    batch, heads, kv_heads, width, capacity = 2, 6, 2, 16, 80
    projected = randn(batch, (heads + 2 * kv_heads) * width)
    keys, values = randn(batch, kv_heads, capacity, width), randn(batch, kv_heads, capacity, width)
    positions = torch.tensor([70, 5], device=DEVICE)
    q, k, v = (part.unflatten(1, (-1, width)) for part in projected.split([heads * width] + [kv_heads * width] * 2, 1))
    norms = [randn(width), randn(width)]
    if has_norms:
        gains = [norm + (window == 7) for norm in norms]
        q, k = (functional.rms_norm(part, (width,), gain, 1e-5) for part, gain in zip((q, k), gains, strict=True))
    rotation = None
    if pairing:
        rotation = make_rotation(
            Rope(pairing=pairing), torch.arange(capacity, device=DEVICE)[None], width, torch.float32
        )
    expected, expected_keys = [], keys.clone()
    for row, position in enumerate(positions.tolist()):
        rotated_q, rotated_k = q[row], k[row]
        if rotation is not None:
            at_position = make_rotation(Rope(pairing=pairing), positions[row : row + 1, None], width, torch.float32)
            rotated_q, rotated_k = (
                at_position.rotate(q[row, None, :, None])[0, :, 0],
                at_position.rotate(k[row, None, :, None])[0, :, 0],
            )
        expected_keys[row, :, position] = rotated_k
        past = torch.cat((values[row, :, :position], v[row][:, None]), dim=1)[None]
        attended = slice(max(0, position + 1 - window), position + 1)
        scoring = Scoring(mask=Mask(), scale=0.3)
        expected.append(
            reference_attention(
                rotated_q[None, :, None], expected_keys[row, None, :, attended], past[:, :, attended], scoring
            ).flatten()
        )
    y = torch.empty(batch, heads * width, device=DEVICE)
    states = torch.empty(batch * kv_heads * num_spans * 16 * (width + 2), device=DEVICE)
    num_finished = torch.zeros(batch * kv_heads, dtype=torch.int32, device=DEVICE)
    empty = torch.zeros(1, device=DEVICE)
    cosine, sine = (rotation.cosine[0, 0], rotation.sine[0, 0]) if rotation else (empty, empty)
    kernels.attend_row[(batch * kv_heads, num_spans)](
        y, states, num_finished, projected, keys, values, positions, cosine, sine, *norms,
        keys.stride(0), keys.stride(1), window, 0.3, 1e-5,
        N=heads, K=kv_heads, H=width, PAIRS=width // 2 if pairing else 0, INTERLEAVED=pairing == "interleaved",
        NORMED=has_norms, UNIT_OFFSET=int(window == 7), GROUP=16, SPANS=num_spans, BLOCK=16, PDL=False,
    )  # fmt: skip
    tolerance = 2e-2 if ON_GPU else 1e-5  # a GPU multiplies float32 tiles in TF32
    torch.testing.assert_close(y, torch.stack(expected), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(keys, expected_keys, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(values[0, :, 70], v[0])
    assert not num_finished.any()
