"""Blocks of 5 and 6 bits and with two levels of scales: stored without rounding, and multiplied by the CPU kernels."""

import gguf
import numpy as np
import pytest
import torch

import clearhead
from clearhead.backends.cpu_kernels import load_kernel_library, unpack
from clearhead.backends.cpu_kernels.products import multiply, multiply_in_kernel
from clearhead.backends.lowering import lower_block
from clearhead.backends.lowering_projections import PackedParts
from clearhead.backends.modules import PackedMatrix
from clearhead.backends.packed import KEPT_BLOCK_TYPES, is_consistent, pack_gguf_blocks, widen
from clearhead.checkpoint.gguf_blocks import BLOCK_TYPES
from clearhead.checkpoint.gguf_quantizers import quantize
from clearhead.checkpoint.gguf_save import save_gguf
from tests.checkpoint.tiny import tiny_network

TYPES = {block_type.name: block_type for block_type in BLOCK_TYPES.values() if block_type.name in KEPT_BLOCK_TYPES}
BLOCK_FORMATS = ("Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")


@pytest.fixture(scope="module")
def kernels():
    if load_kernel_library(build=True) is None:
        pytest.skip("needs a C++ compiler")


def stored(name, rows, columns, seed=0):
    """Return a packed weight, and its values as the gguf package reads them."""
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.1
    if name in ("Q4_1",):
        blocks = torch.from_numpy(gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType[name]))
    else:
        blocks = quantize(values, name)
    exact = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[name])
    packed = pack_gguf_blocks(blocks.reshape(-1, TYPES[name].bytes_per_block), rows, name)
    return packed, torch.from_numpy(np.array(exact, dtype=np.float32))


def widths(name):
    return (256, 768) if name.endswith("_K") else (32, 96, 64, 576)


@pytest.mark.parametrize("name", KEPT_BLOCK_TYPES)
def test_blocks_are_stored_without_rounding_or_waste(name):
    for columns in widths(name):
        packed, exact = stored(name, 19, columns)
        assert torch.equal(packed.unpack(), exact)
        assert torch.equal(packed.rows(slice(3, 9)).unpack(), exact[3:9])
        assert torch.equal(packed.rows(torch.tensor([5, 2])).unpack(torch.bfloat16), exact[[5, 2]].bfloat16())
        assert is_consistent(packed)
        if columns % 128 == 0:
            num_bytes = TYPES[name].bytes_per_block * 19 * columns // TYPES[name].values_per_block
            assert num_bytes <= packed.num_bytes <= 1.03 * num_bytes


@pytest.mark.parametrize("name", KEPT_BLOCK_TYPES)
@pytest.mark.usefixtures("kernels")
def test_the_form_for_a_gpu_has_the_same_values_and_the_cpu_kernels_do_not_misread_it(name):
    for columns in widths(name):
        packed, exact = stored(name, 19, columns)
        wide = widen(packed)
        assert wide.high_bits is None
        assert torch.equal(wide.unpack(), exact)
        assert torch.equal(wide.rows(torch.tensor([5, 2])).unpack(), exact[[5, 2]])
        assert torch.equal(unpack(wide, torch.float32), exact)
        assert is_consistent(wide)
        if columns % 128 == 0:
            assert wide.num_bytes <= 19 * columns * 9.1 / 8
        x = torch.randn(3, columns, generator=torch.Generator().manual_seed(1))
        with torch.inference_mode():
            assert (multiply(x, wide) - x @ exact.T).norm() <= 0.02 * (x @ exact.T).norm()


@pytest.mark.parametrize("name", KEPT_BLOCK_TYPES)
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
    for columns, rows in zip(widths(name), (64, 83, 32, 100), strict=False):
        packed, exact = stored(name, rows, columns)
        x = torch.randn(num_tokens, columns, generator=torch.Generator().manual_seed(1))
        x[0, :32] *= 50
        groups = x.unflatten(-1, (-1, 32))
        scales = groups.abs().amax(-1, keepdim=True) / 127
        rounded = ((groups / scales).round() * scales).flatten(-2)
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


@pytest.fixture(scope="module", params=["q4_k_m", "q5_k_m", "q6_k"])
def model_file(request, tmp_path_factory):
    """A model whose values and keys have different formats in two of three layers, and biases."""
    path = tmp_path_factory.mktemp("model") / f"{request.param}.gguf"
    sizes = {"width": 256, "num_layers": 3, "num_heads": 4, "feed_forward": 512, "vocab_size": 64, "context": 128}
    network = tiny_network(**sizes, attention_bias=True)
    for parameter in network.parameters():
        parameter.data *= 0.2
    save_gguf(path, network, None, file_type=request.param)
    return path


def test_a_stored_model_keeps_the_blocks_of_the_file(model_file):
    full = clearhead.load(model_file, dtype="float32", fast=False).network
    packed = clearhead.load(model_file, dtype="float32", weights="stored", fast=False).network
    matrices = {name: part for name, part in packed.named_modules() if isinstance(part, PackedMatrix)}
    assert len(matrices) == 3 * 7 + 1
    for name, matrix in matrices.items():
        assert torch.equal(matrix.packed.unpack(), full.get_parameter(f"{name}.weight").detach()), name
    stored_bytes = sum(matrix.packed.num_bytes for matrix in matrices.values())
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
    assert (PackedParts in formats) == ("q6_k" not in model_file.name)
    prompt = torch.randint(0, 64, (30,), generator=torch.Generator().manual_seed(0)).tolist()
    tokens = fast.generate(prompt, max_new_tokens=20, temperature=0.0).tokens
    scores = [torch.tensor(each.score(prompt + tokens).logprobs) for each in (plain, fast)]
    assert (scores[0] - scores[1]).abs().max() < 0.05
    fast.save(tmp_path / "saved")
    again = clearhead.load(tmp_path / "saved", fast=True)
    assert again.generate(prompt, max_new_tokens=20, temperature=0.0).tokens == tokens
    for name, tensor in fast.network.state_dict().items():
        assert torch.equal(again.network.state_dict()[name], tensor), name
