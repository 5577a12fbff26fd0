"""The kernels of a token in the CUDA graph, against what they have to read and write."""

from collections import Counter

import pytest

from clearhead.costs.formulas.parameters import parameters
from clearhead.costs.simulation.layout import lay_out
from clearhead.families import preset
from tests.costs.test_operations import workload_of


def kernels_of(name, dtype):
    return lay_out(workload_of(preset(name), "decode", 24, batch=1, dtype=dtype, device_type="cuda")).kernels


@pytest.mark.parametrize(("name", "matrices"), [("gpt2", 1), ("llama-3.2-1b", 2)])
def test_the_products_read_every_weight_once(name, matrices):
    """Norms, biases and activations are in them; of the table of positions an embedding reads a row."""
    config = preset(name)
    attention, feed_forward = config.decoder.layers[0].attention, config.decoder.layers[0].feed_forward
    products = [kernel for kernel in kernels_of(name, "bfloat16") if kernel.name == "multiply_row"]
    num_layers, width, inner = len(config.decoder.layers), config.width, feed_forward.width
    assert len(products) == 4 * num_layers + 1
    assert {kernel.shape[0] for kernel in products} == {1, matrices}
    positions = getattr(config.decoder.embedding.positions, "num_positions", 0) * width
    queries, keys = (heads * attention.head_width for heads in (attention.num_heads, attention.num_kv_heads))
    # What goes in, what comes out, and twice what that is added to.
    projected, output, up, down = width + queries + 2 * keys, queries + 2 * width, width + inner, inner + 2 * width
    vectors = num_layers * (projected + output + up + down) + width + config.vocab_size
    numbers = sum(parameters(config).values()) - positions + vectors
    assert sum(kernel.num_bytes for kernel in products) == 2 * numbers


@pytest.mark.parametrize(
    ("name", "dtype", "others"),
    [
        ("llama-3.2-1b", "float32", {"embedding": 1}),
        ("llama-3.2-1b", "bfloat16", {"embedding": 1, "_to_copy": 1}),  # logits are chosen from in float32
        ("gpt2", "float32", {"embedding": 2, "clamp": 1, "add": 2, "moments": 25}),  # of its layer norms
    ],
)
def test_what_a_graph_runs_beside_its_five_kernels_a_layer(name, dtype, others):
    num_layers = len(preset(name).decoder.layers)
    own = {"multiply_row": 4 * num_layers + 1, "attend_row": num_layers}
    choice = {"argmax": 1, "copy_": 1, "add_": 2}
    assert Counter(kernel.name for kernel in kernels_of(name, dtype)) == own | choice | others
