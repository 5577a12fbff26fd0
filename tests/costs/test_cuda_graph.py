"""The simulated kernels of a decode step in a CUDA graph, against what they must read, write and multiply."""

from collections import Counter
from dataclasses import replace

import pytest

from clearhead.architecture import Rope, SlidingWindow
from clearhead.costs.calibration.toy_networks import toy_llama
from clearhead.costs.formulas.memory import cache_bytes
from clearhead.costs.formulas.operations import operation_costs
from clearhead.costs.formulas.parameters import total_parameters
from clearhead.costs.simulation.meta_run import simulate
from clearhead.costs.simulation.peak_memory import estimate_memory
from clearhead.costs.simulation.workload_steps import uses_cuda_graph
from clearhead.families import preset
from tests.costs.cases import CASES, make_workload


def kernels_of(name, dtype):
    return simulate(make_workload(preset(name), "decode", 24, batch=1, dtype=dtype, device_type="cuda")).kernels


@pytest.mark.parametrize(("name", "num_matrices"), [("gpt2", 1), ("llama-3.2-1b", 2)])
def test_products_read_every_weight_once(name, num_matrices):
    """Norms, biases and activations are part of them; of the position table the embedding reads one row."""
    config = preset(name)
    attention, feed_forward = config.decoder.layers[0].attention, config.decoder.layers[0].feed_forward
    products = [kernel for kernel in kernels_of(name, "bfloat16") if kernel.name == "multiply_row"]
    num_layers, width, inner = len(config.decoder.layers), config.width, feed_forward.width
    assert len(products) == 4 * num_layers + 1
    assert {kernel.shape[0] for kernel in products} == {1, num_matrices}
    positions = getattr(config.decoder.embedding.positions, "num_positions", 0) * width
    queries, keys = (heads * attention.head_width for heads in (attention.num_heads, attention.num_kv_heads))
    # Inputs, outputs, and twice the residual that an output is added to.
    projected, output, up, down = width + queries + 2 * keys, queries + 2 * width, width + inner, inner + 2 * width
    vectors = num_layers * (projected + output + up + down) + width + config.vocab_size
    num_elements = total_parameters(config) - positions + vectors
    assert sum(kernel.num_bytes for kernel in products) == 2 * num_elements


@pytest.mark.parametrize(
    ("name", "dtype", "others"),
    [
        ("llama-3.2-1b", "float32", {"embedding": 1}),
        ("llama-3.2-1b", "bfloat16", {"embedding": 1, "_to_copy": 1}),  # logits are converted to float32
        ("gpt2", "float32", {"embedding": 2, "clamp": 1, "add": 2, "moments": 25}),  # of its layer norms
    ],
)
def test_a_graph_runs_five_kernels_per_layer_and_a_few_others(name, dtype, others):
    num_layers = len(preset(name).decoder.layers)
    triton_kernels = {"multiply_row": 4 * num_layers + 1, "attend_row": num_layers}
    choice = {"argmax": 1, "copy_": 1, "add_": 2}
    assert Counter(kernel.name for kernel in kernels_of(name, dtype)) == triton_kernels | choice | others


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("config", [toy_llama(), preset("gpt2")], ids=["toy", "gpt2"])
def test_a_graph_runs_the_flops_of_the_formulas_and_holds_the_whole_context(config, batch):
    workload = make_workload(config, "decode", 24, batch=batch, device_type="cuda")
    assert uses_cuda_graph(workload)
    run = simulate(workload)
    names = [kernel.name for kernel in run.kernels]
    assert names.count("attend_row") == len(workload.config.decoder.layers)
    assert ("multiply_row" in names) == (batch == 1)
    assert run.flops == sum(operation.flops for operation in operation_costs(workload))
    longer = replace(workload, context=32)
    rotated = {
        layer.attention for layer in workload.config.decoder.layers if isinstance(layer.attention.position, Rope)
    }
    angles = sum(4 * attention.head_width for attention in rotated)  # a cosine and a sine per pair, in float32
    more = cache_bytes(longer) - cache_bytes(workload) + (longer.context - workload.context) * angles
    assert estimate_memory(longer).peak - estimate_memory(workload).peak == more


def test_a_graph_reads_only_the_window_but_keeps_all_tokens():
    config = toy_llama()
    layers = [
        replace(layer, attention=replace(layer.attention, pattern=SlidingWindow(size=5)))
        for layer in config.decoder.layers
    ]
    windowed = make_workload(
        replace(config, decoder=replace(config.decoder, layers=tuple(layers))), "decode", 24, device_type="cuda"
    )
    run, causal_run = simulate(windowed), simulate(replace(windowed, config=config))
    assert run.flops == sum(operation.allowed_flops for operation in operation_costs(windowed)) < causal_run.flops
    bytes_read, causal_bytes_read = (
        {kernel.num_bytes for kernel in one.kernels if kernel.name == "attend_row"} for one in (run, causal_run)
    )
    assert {24 * num_bytes for num_bytes in bytes_read} == {5 * num_bytes for num_bytes in causal_bytes_read}
    assert run.peak_bytes == causal_run.peak_bytes


def test_unsupported_models_devices_and_precisions_use_no_cuda_graph():
    assert not uses_cuda_graph(make_workload(preset("bloom-560m"), "decode", 24, device_type="cuda"))
    assert not uses_cuda_graph(make_workload(CASES["llama-3.1-8b"], "decode", 24))
    float64 = make_workload(toy_llama(), "decode", 24, device_type="cuda", dtype="float64")
    assert not uses_cuda_graph(float64)
    assert estimate_memory(float64).peak > 0
