"""The summary against the network; two configs that differ have different summaries."""

import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from clearhead.families import preset, presets
from clearhead.model import Transformer
from clearhead.summary import format_ranges, print_summary, summarize
from tests.parity.mutants import mutants


@pytest.mark.parametrize(
    "name", ["gpt2", "t5-small", "bert-base", "gemma-3-1b", "llama-4-scout", "grok-1", "bloom-560m"]
)
def test_parameters_of_parts_and_layers_equal_those_of_the_network(name):
    config = preset(name)
    summary = summarize(config)
    with torch.device("meta"):
        network = Transformer(config)
    assert summary.parameters == sum(parameter.numel() for parameter in network.parameters())
    assert sum(summary.parts.values()) == summary.parameters
    in_layers = sum(p.numel() for n, p in network.named_parameters() if ".layers." in n)
    assert sum(group.parameters for group in summary.layers) == in_layers
    for stack_name, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        numbers = sorted(n for group in summary.layers if group.stack == stack_name for n in group.numbers)
        assert numbers == list(range(len(stack.layers) if stack else 0))


def test_active_parameters_of_a_mixture():
    """Published: DeepSeek-V3 has 671B parameters, 37B of them active per token."""
    summary = summarize(preset("deepseek-v3"))
    assert round(summary.parameters / 1e9) == 671
    assert round(summary.active_parameters / 1e9) in (37, 38)  # 37.55 with embedding and head


def distinct_layers(stack):
    return stack and replace(stack, layers=tuple(dict.fromkeys(stack.layers)))


def words(config):
    """The summary without its counts."""
    summary = summarize(config)
    layers = [replace(group, parameters=0) for group in summary.layers]
    return replace(summary, parameters=0, active_parameters=0, parts={}, layers=layers)


@pytest.mark.parametrize(
    "name", ["gpt2", "gemma-3-1b", "deepseek-v3", "llama-4-scout", "grok-2", "bert-base", "t5-small", "mpt-7b"]
)
def test_configs_that_differ_in_one_field_have_different_summaries(name):
    config = preset(name)
    config = replace(config, encoder=distinct_layers(config.encoder), decoder=distinct_layers(config.decoder))
    expected = words(config)
    assert not [path for path, other in mutants(config) if words(other) == expected]


def test_the_summary_of_every_preset_is_printed_in_full():
    for name in presets():
        out, summary = io.StringIO(), summarize(preset(name))
        print_summary(summary, name, Console(file=out, width=100))
        assert name in out.getvalue()
        assert all(f"{size:,}" in out.getvalue() for size in summary.parts.values())
        assert "…" not in out.getvalue()
        assert ("\nhead " in out.getvalue()) == (preset(name).head is not None or preset(name).classifier is not None)


def test_words_of_a_summary():
    assert format_ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    text = summarize(preset("llama-3.1-8b")).layers[0].attention
    assert text.startswith(
        "grouped-query, 32 heads of 128, 8 key-value heads; rope theta 500000, (llama3 scaling factor 8"
    )
    assert "query temperature floor 8,192" in summarize(preset("llama-4-scout")).layers[1].attention
