"""Blocks of all GGUF types that stay packed: stored without rounding, and multiplied by the CPU kernels."""

import platform
from functools import partial

import gguf
import numpy as np
import pytest
import torch

import clearhead
from clearhead.backends.cpu_kernels import library, load_kernel_library, unpack
from clearhead.backends.cpu_kernels.products import multiply, multiply_in_kernel
from clearhead.backends.lowering import lower_block
from clearhead.backends.lowering_projections import PackedParts
from clearhead.backends.modules import PackedMatrix
from clearhead.backends.packed import PackedWeight, is_consistent, widen
from clearhead.checkpoint import gguf_packing
from clearhead.checkpoint.gguf import GgufFile, open_gguf
from clearhead.checkpoint.gguf_blocks import dequantize
from clearhead.checkpoint.gguf_model import _read_stored
from clearhead.checkpoint.gguf_packing import STORED_BLOCK_TYPES, pack_blocks
from clearhead.checkpoint.gguf_save import GGUF_FILE_TYPES
from clearhead.errors import ClearheadError
from tests.checkpoint.random_blocks import BY_NAME, HALVES, random_blocks, save_random_blocks, weight_blocks
from tests.checkpoint.test_gguf_blocks import theirs
from tests.checkpoint.tiny import tiny_network

SIMPLE_TYPES = ("Q4_0", "Q4_1", "Q8_0")  # tests/backends/cpu_kernels multiplies with their formats
BLOCK_FORMATS = tuple(name for name in STORED_BLOCK_TYPES if name not in SIMPLE_TYPES)
SMALL = {"width": 256, "num_layers": 1, "num_heads": 4, "feed_forward": 256, "vocab_size": 64, "context": 128}
# Types that take more bits in memory than in a file.
MEMORY_BITS = {"Q4_K": 4.625, "Q5_K": 5.625, "Q2_K": 5.125, "Q3_K": 4.5625, "TQ1_0": 4.5, "TQ2_0": 4.5, "Q1_0": 4.5}
MEMORY_BITS |= {"MXFP4": 5.5, "IQ4_NL": 8.5, "IQ4_XS": 8.3125}


@pytest.fixture(scope="module")
def kernels():
    if load_kernel_library(build=True) is None:
        pytest.skip("needs a C++ compiler")


def stored(name, rows, columns, seed=0):
    """Return a packed weight, and its values as the gguf package reads them."""
    blocks = weight_blocks(name, rows, columns, seed)
    return pack_blocks(blocks, rows, BY_NAME[name]), torch.from_numpy(theirs(name, blocks)).reshape(rows, columns)


def widths(name):
    size = BY_NAME[name].values_per_block
    return {32: (32, 96, 64, 576, 640), 128: (128, 384, 640), 256: (256, 768)}[size]


@pytest.mark.parametrize("name", STORED_BLOCK_TYPES)
def test_blocks_are_stored_without_rounding_or_waste(name):
    for columns in widths(name):
        packed, exact = stored(name, 19, columns)
        assert torch.equal(packed.unpack(), exact)
        assert torch.equal(packed.rows(slice(3, 9)).unpack(), exact[3:9])
        assert torch.equal(packed.rows(torch.tensor([5, 2])).unpack(torch.bfloat16), exact[[5, 2]].bfloat16())
        assert is_consistent(packed)
        if columns % 128 == 0:
            bits = MEMORY_BITS.get(name, BY_NAME[name].bytes_per_block * 8 / BY_NAME[name].values_per_block)
            assert packed.num_bytes * 8 == bits * 19 * columns


@pytest.mark.parametrize("name", STORED_BLOCK_TYPES)
def test_random_bytes_have_the_values_that_reading_the_file_gives(name):
    """Also infinite numbers and NaN, so that the loader finds them, and a few rows at a time."""
    blocks = random_blocks(name, 300)
    if name == "MXFP4":
        blocks[:, 0] = 104 + blocks[:, 0] % 40
    exact = dequantize(blocks, BY_NAME[name]).reshape(3, -1)
    for chunk in (1 << 20, 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gguf_packing, "_VALUES_PER_CHUNK", chunk)
            values = pack_blocks(blocks, 3, BY_NAME[name]).unpack()
        assert torch.equal(values.isnan(), exact.isnan())
        assert torch.equal(values.nan_to_num(0, 1, -1), exact.nan_to_num(0, 1, -1))


def test_scales_of_mxfp4_that_float16_cannot_hold():
    """The largest power of two is 2^15 and the smallest 2^-24; zeros may have any scale."""
    kind, blocks = BY_NAME["MXFP4"], weight_blocks("MXFP4", 4, 96)
    for exponent, fits in ((104, True), (143, True), (103, False), (144, False), (0, False), (255, False)):
        blocks[5, 0] = exponent
        packed = pack_blocks(blocks, 4, kind)
        assert (packed is not None) == fits, exponent
        if packed is not None:
            assert torch.equal(packed.unpack(), dequantize(blocks, kind).reshape(4, 96))
    blocks[5] = 0
    assert torch.equal(pack_blocks(blocks, 4, kind).unpack(), dequantize(blocks, kind).reshape(4, 96))


@pytest.mark.parametrize("name", STORED_BLOCK_TYPES)
@pytest.mark.usefixtures("kernels")
def test_the_form_for_a_gpu_has_the_same_values_and_the_cpu_kernels_do_not_misread_it(name):
    for columns in widths(name):
        packed, exact = stored(name, 19, columns)
        wide = widen(packed)
        assert not wide.needs_widening
        assert torch.equal(wide.unpack(), exact)
        assert torch.equal(wide.rows(torch.tensor([5, 2])).unpack(), exact[[5, 2]])
        assert torch.equal(unpack(wide, torch.float32), exact)
        assert is_consistent(wide)
        if columns % 128 == 0:
            assert wide.num_bytes <= 19 * columns * 9 / 8
        x = torch.randn(3, columns, generator=torch.Generator().manual_seed(1))
        with torch.inference_mode():
            assert (multiply(x, wide) - x @ exact.T).norm() <= 0.02 * (x @ exact.T).norm()


@pytest.mark.parametrize("name", STORED_BLOCK_TYPES)
@pytest.mark.usefixtures("kernels")
def test_the_kernel_unpacks_the_same_values(name):
    for columns in widths(name):
        packed, exact = stored(name, 40, columns)
        assert torch.equal(unpack(packed, torch.float32), exact)
        assert torch.equal(unpack(packed, torch.bfloat16), exact.bfloat16())


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 9, 40])
@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.usefixtures("kernels")
def test_products_equal_those_of_the_dequantized_weight(name, num_tokens):
    """The kernel rounds x to 8 bits in groups of 32, so the reference does too: the rest is the order of sums."""
    for columns, rows in zip(widths(name), (64, 83, 32, 100, 70), strict=False):
        packed, exact = stored(name, rows, columns)
        x = torch.randn(num_tokens, columns, generator=torch.Generator().manual_seed(1))
        x[0, :32] *= 50
        groups = x.unflatten(-1, (-1, 32))
        largest = groups.abs().amax(-1, keepdim=True)
        rounded = ((groups * (127 / largest)).round() * (largest / 127)).flatten(-2)
        bias = torch.randn(rows, generator=torch.Generator().manual_seed(2))
        expected = rounded.double() @ exact.double().T + bias
        actual = multiply_in_kernel(x, packed, bias)
        torch.testing.assert_close(actual.double(), expected, rtol=2e-5, atol=2e-5 * float(expected.abs().max()))
        plain = x.double() @ exact.double().T + bias
        assert (actual - plain).norm() <= 0.01 * plain.norm()


@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.usefixtures("kernels")
def test_the_bits_of_a_row_do_not_depend_on_the_others(name):
    """One row is multiplied with W as it is stored, many rows with panels of it."""
    if not load_kernel_library().clearhead_supports_prompts():
        pytest.skip("holds with AVX-512 only")
    for columns in widths(name):
        packed, _ = stored(name, 70, columns)
        x = torch.randn(20, columns, generator=torch.Generator().manual_seed(1))
        together = multiply_in_kernel(x, packed)
        for row in (0, 7, 19):
            assert torch.equal(multiply_in_kernel(x[row], packed), together[row])
        assert torch.equal(multiply_in_kernel(x[:3], packed), together[:3])


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors only have the plain loops")
@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.usefixtures("kernels")
def test_the_plain_loops_compute_the_same_as_avx512(name, plain_library, monkeypatch):
    packed, x = [stored(name, 70, columns)[0] for columns in widths(name)], {}
    for weight in packed:
        x[weight] = torch.randn(20, weight.columns, generator=torch.Generator().manual_seed(1))

    def products_of(weight):
        return torch.cat([multiply_in_kernel(x[weight][:rows], weight) for rows in (1, 3, 20)])

    vectorized = [products_of(weight) for weight in packed]
    monkeypatch.setattr(library, "_loaded", plain_library)
    for weight, expected in zip(packed, vectorized, strict=True):
        torch.testing.assert_close(products_of(weight), expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(unpack(weight, torch.float32), weight.unpack())


# Block types of most matrices, of the head, of values and down projections in two of three layers.
MODEL_FILES = {
    "q4_k_m": ("Q4_K", "Q6_K", "Q6_K"),
    "q5_k_m": ("Q5_K", "Q6_K", "Q6_K"),
    "q6_k": ("Q6_K", "Q6_K", "Q6_K"),
    "q2_k": ("Q2_K", "Q6_K", "Q3_K"),
    "q3_k_m": ("Q3_K", "Q6_K", "Q5_K"),
    "iq4_xs": ("IQ4_XS", "IQ4_NL", "Q5_K"),
    "mxfp4": ("MXFP4", "TQ1_0", "TQ2_0"),
}


@pytest.fixture(scope="module", params=MODEL_FILES)
def model_file(request, tmp_path_factory):
    """A model whose values and keys have different formats in two of three layers, and biases."""
    path = tmp_path_factory.mktemp("model") / f"{request.param}.gguf"
    sizes = {"width": 256, "num_layers": 3, "num_heads": 4, "feed_forward": 512, "vocab_size": 64, "context": 128}
    network = tiny_network(**sizes, attention_bias=True)
    for parameter in network.parameters():
        parameter.data *= 0.2
    most, head, sensitive = MODEL_FILES[request.param]
    save_random_blocks(path, network, most, head, sensitive, most)
    return path


def test_a_stored_model_keeps_the_blocks_of_the_file(model_file):
    full = clearhead.load(model_file, dtype="float32", fast=False).network
    packed = clearhead.load(model_file, dtype="float32", weights="stored", fast=False).network
    matrices = {name: part for name, part in packed.named_modules() if isinstance(part, PackedMatrix)}
    assert len(matrices) == 3 * 7 + 1
    for name, matrix in matrices.items():
        assert torch.equal(matrix.packed.unpack(), full.get_parameter(f"{name}.weight").detach()), name
    stored_bytes = sum(matrix.packed.num_bytes for matrix in matrices.values())
    assert stored_bytes <= 0.29 * sum(parameter.nbytes for parameter in full.parameters())
    if model_file.stem in GGUF_FILE_TYPES:
        assert stored_bytes <= 1.03 * model_file.stat().st_size
    tokens = torch.randint(0, 64, (2, 20))
    with torch.no_grad():
        torch.testing.assert_close(packed(tokens), full(tokens), rtol=0.05, atol=0.05)


@pytest.mark.usefixtures("kernels")
def test_a_stored_model_runs_in_the_kernels_with_the_same_tokens_and_bits(model_file, tmp_path):
    """Prompt and single tokens agree with the modules, and a saved copy has the same bits."""
    plain = clearhead.load(model_file, dtype="float32", weights="stored", fast=False)
    fast = clearhead.load(model_file, dtype="float32", weights="stored", fast=True)
    formats = {
        type(lower_block(layer, keep_formats=True).query_key_value.weight) for layer in plain.network.decoder.layers
    }
    assert (PackedParts in formats) == (model_file.stem != "q6_k")
    prompt = torch.randint(0, 64, (30,), generator=torch.Generator().manual_seed(0)).tolist()
    tokens = fast.generate(prompt, max_new_tokens=20, temperature=0.0).tokens
    scores = [torch.tensor(each.score(prompt + tokens).logprobs) for each in (plain, fast)]
    assert (scores[0] - scores[1]).abs().max() < 0.05
    fast.save(tmp_path / "saved")
    again = clearhead.load(tmp_path / "saved", fast=True)
    assert again.generate(prompt, max_new_tokens=20, temperature=0.0).tokens == tokens
    for name, tensor in fast.network.state_dict().items():
        assert torch.equal(again.network.state_dict()[name], tensor), name


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("name", [*STORED_BLOCK_TYPES, "NVFP4", "IQ3_S"])
def test_matrices_are_read_in_a_form_for_the_device_or_as_numbers(tmp_path, name, wide):
    """Only the types of STORED_BLOCK_TYPES stay packed; for a GPU, those that only CPU kernels read are widened."""
    path = tmp_path / "model.gguf"
    save_random_blocks(path, tiny_network(**SMALL), name, name, name, name)
    file = open_gguf(path)
    stored, exact = (read(file, "blk.0.ffn_up.weight") for read in (partial(_read_stored, wide=wide), GgufFile.read))
    assert isinstance(stored, PackedWeight) == (name in STORED_BLOCK_TYPES)
    if isinstance(stored, PackedWeight):
        assert not (stored.needs_widening if wide else stored.is_wide)
        stored = stored.unpack()
    assert torch.equal(stored, exact)


def test_a_matrix_of_mxfp4_whose_scales_do_not_fit_becomes_numbers(tmp_path):
    path = tmp_path / "model.gguf"
    save_random_blocks(path, tiny_network(**SMALL), "MXFP4", "MXFP4", "MXFP4", "MXFP4")
    tensor = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "blk.0.ffn_up.weight")
    with path.open("r+b") as file:
        file.seek(int(tensor.data_offset))
        file.write(bytes([90]))
    full, packed = (clearhead.load(path, weights=weights, fast=False).network for weights in ("full", "stored"))
    feed_forward = packed.decoder.layers[0].feed_forward
    assert isinstance(feed_forward.gate, PackedMatrix)
    assert torch.equal(feed_forward.up.weight, full.decoder.layers[0].feed_forward.up.weight)


@pytest.mark.parametrize("name", sorted(set(BLOCK_FORMATS) & set(HALVES) - {"MXFP4"}))
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_damaged_scales_are_found(tmp_path, name, number):
    path = tmp_path / "model.gguf"
    save_random_blocks(path, tiny_network(**SMALL), name, name, name, name)
    tensor = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "blk.0.ffn_up.weight")
    with path.open("r+b") as file:
        file.seek(int(tensor.data_offset) + HALVES[name][0])
        file.write(np.float16(number).tobytes())
    with pytest.raises(ClearheadError, match=r"blk\.0\.ffn_up\.weight holds NaN or infinite numbers"):
        clearhead.load(path, dtype="float32", weights="stored", fast=False)
