"""What the backends support: decided from a config, the same for a live network, and as docs/fast-path.md says."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import clearhead
from clearhead.architecture import DynamicScaling, Rope
from clearhead.backends import pack_network, unsupported_network_reason, unsupported_reason
from clearhead.families import preset
from tests.backends.networks import graph_network, toy_network, with_attention
from tests.toy_presets import shrink

PAGE = Path(__file__).parents[2] / "docs" / "fast-path.md"


def documented_support():
    """Yield the presets, the CPU column and the GPU column of each row of the table in docs/fast-path.md."""
    section = PAGE.read_text(encoding="utf-8").partition("## What is supported")[2]
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[0].startswith("`"):
            yield re.findall("`(.+?)`", cells[0]), cells[1], cells[2]


def test_the_page_names_a_preset_for_every_combination_of_reasons():
    documented = {name for names, _, _ in documented_support() for name in names}
    assert reasons_of(clearhead.presets()) == reasons_of(documented)


def reasons_of(names):
    """Return the pairs of reasons that occur."""
    return {tuple(unsupported_reason(preset(name), backend) for backend in ("cpu", "paged")) for name in names}


@pytest.mark.parametrize(("names", "cpu", "paged"), list(documented_support()))
def test_the_page_states_the_support_of_each_preset(names, cpu, paged):
    for name in names:
        for backend, cell in (("cpu", cpu), ("paged", paged)):
            reason = unsupported_reason(preset(name), backend)
            assert cell == ("yes" if reason is None else re.sub(" (is|are) not supported$", "", reason)), name


@pytest.mark.parametrize("backend", ["cpu", "cuda", "paged"])
@pytest.mark.parametrize(
    "name", ["llama-3.1-8b", "gpt2", "gpt1", "bart-base", "bert-base", "deepseek-v3", "bloom-560m"]
)
def test_an_unaltered_network_is_supported_if_its_config_is(name, backend):
    network = toy_network(name)
    assert unsupported_network_reason(network, backend) == unsupported_reason(network.config, backend)


@pytest.mark.parametrize(
    ("changes", "backends", "reason"),
    [
        ({"head_width": 16, "num_heads": 32, "num_kv_heads": 1}, ["cuda"], "more than 16 query heads"),
        ({"head_width": 12}, ["cuda"], "head width 12 is not supported: it must be a power of two"),
        ({"softcap": 30.0}, ["cuda"], "attention with softcap"),
        ({"clip": 8.0}, ["cuda", "paged"], "attention with clip"),
        ({"value_width": 8}, ["cpu", "cuda", "paged"], "values of another width"),
        (
            {"position": Rope(scaling=DynamicScaling(factor=2.0, original_context=16))},
            ["cpu", "cuda", "paged"],
            "DynamicScaling of rotary positions",
        ),
    ],
)
def test_unsupported_attention_is_named(changes, backends, reason):
    config = with_attention(shrink(preset("llama-3.2-1b")), **({"head_width": 16} | changes))
    for backend in ("cpu", "cuda", "paged"):
        found = unsupported_reason(config, backend)
        assert found.startswith(reason) if backend in backends else found is None


def test_layers_must_have_equal_head_sizes_in_the_cuda_graph():
    config = graph_network("llama-3.2-1b").config
    first, second = config.decoder.layers
    other = replace(second, attention=replace(second.attention, num_heads=2 * second.attention.num_heads))
    mixed = replace(config, decoder=replace(config.decoder, layers=(first, other)))
    assert unsupported_reason(mixed, "cuda") == "layers with different head sizes are not supported"
    assert unsupported_reason(mixed, "cpu") is None


@pytest.mark.parametrize("backend", ["cpu", "cuda", "paged"])
def test_unsupported_dtypes_are_named(backend):
    network = graph_network("llama-3.2-1b")
    assert unsupported_network_reason(network.bfloat16(), backend) is None
    assert unsupported_network_reason(network.double(), backend) == "float64 weights are not supported"


def test_the_cpu_kernels_need_weights_on_the_cpu():
    with torch.device("meta"):
        network = clearhead.Transformer(shrink(preset("gpt2")))
    assert unsupported_network_reason(network, "cpu") == "float32 weights on meta are not supported"


@pytest.mark.parametrize("backend", ["cuda", "paged"])
def test_the_gpu_kernels_do_not_take_altered_networks(backend):
    mixed = graph_network("llama-3.2-1b")
    mixed.decoder.layers[1].bfloat16()
    assert unsupported_network_reason(mixed, backend) == "weights of several dtypes are not supported"
    for part in ("final_norm", "layers.0", "embedding"):
        hooked = graph_network("llama-3.2-1b")
        hooked.decoder.get_submodule(part).register_forward_hook(lambda *arguments: None)
        assert unsupported_network_reason(hooked, backend) == "modules were replaced or have hooks"
    assert unsupported_network_reason(pack_network(graph_network("llama-3.2-1b"), "int8"), backend) is None
