"""Networks whose weights are rounded for a text: the loss is smaller, is measured right, and the folder loads."""

import copy
import json
import sys

import pytest
import torch

import clearhead
from clearhead.api import Model, load, quantize_for_text
from clearhead.backends import is_packed, pack_network
from clearhead.checkpoint import calibration, pack_for_text
from clearhead.checkpoint.calibration import _first_states
from clearhead.cli import main
from clearhead.errors import ClearheadError
from clearhead.model import Transformer
from clearhead.tokenization import train_tokenizer
from tests.checkpoint.tiny import tiny_network
from tests.model.toys import redraw
from tests.toy_presets import shrink

TEXT = "The keeper counts 17 lamps. He writes the number down, and it's 3:45 in Zürich. " * 20


def toy_network(name):
    torch.manual_seed(0)
    network = Transformer(shrink(clearhead.preset(name))).eval()
    redraw(network)
    return network


def repetitive_tokens(network, count=2048):
    """Return tokens of which a few are frequent, so that the inputs of the layers depend on each other."""
    generator = torch.Generator().manual_seed(1)
    size = network.config.vocab_size
    return (torch.rand(count, generator=generator) ** 3 * size).long().clamp(max=size - 1).tolist()


@pytest.mark.parametrize("name", ["llama-3.2-1b", "gpt2", "qwen3-30b-a3b", "deepseek-v3"])
def test_calibrated_rounding_loses_less_than_plain_rounding(name, monkeypatch):
    monkeypatch.setattr(calibration, "_WINDOW", 32)
    network = toy_network(name)
    tokens = repetitive_tokens(network)
    plain = pack_network(copy.deepcopy(network), "int4")
    held_out = torch.tensor(tokens[-8 * 32 :]).view(8, 32)
    with torch.inference_mode():
        before, after_plain = network(held_out).log_softmax(-1), plain(held_out).log_softmax(-1)
    loss = pack_for_text(network, tokens, "int4")
    with torch.inference_mode():
        after = network(held_out).log_softmax(-1)
    assert is_packed(network)
    divergence = (before.exp() * (before - after)).sum(-1).mean()
    plain_divergence = (before.exp() * (before - after_plain)).sum(-1).mean()
    assert loss.divergence == pytest.approx(float(divergence), rel=1e-3)
    assert loss.divergence < 0.8 * float(plain_divergence)
    targets = held_out[:, 1:, None]
    assert loss.perplexity_before == pytest.approx(
        float(before[:, :-1].gather(2, targets).mean().neg().exp()), rel=1e-4
    )
    assert loss.perplexity_after == pytest.approx(float(after[:, :-1].gather(2, targets).mean().neg().exp()), rel=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "opt-125m", "gemma-3-1b"])
def test_layers_get_the_inputs_of_a_forward_pass(name):
    network = toy_network(name)
    windows = list(torch.tensor(repetitive_tokens(network, 96)).view(3, 1, 32))
    with torch.no_grad():
        states, arguments = _first_states(network, windows)
        for window, state in zip(windows, states, strict=True):
            x = state
            for block, others in zip(network.decoder.layers, arguments, strict=True):
                x = block(x, *others)
            assert torch.equal(network.decoder.final_norm(x), network.hidden_states(window))


@pytest.fixture(scope="module")
def model():
    tokenizer = train_tokenizer([TEXT], kind="bpe", vocab_size=300)
    return Model(tiny_network(width=64, feed_forward=96, vocab_size=300), tokenizer)


def copy_of(model):
    return Model(copy.deepcopy(model.network), model.tokenizer)


def test_the_command_writes_a_folder_and_prints_the_loss(tmp_path, model, monkeypatch, capsys):
    model.save(tmp_path / "full")
    (tmp_path / "book.txt").write_text(TEXT, encoding="utf-8")
    arguments = ["convert", str(tmp_path / "full"), str(tmp_path / "small"), "--weights", "int4"]
    monkeypatch.setattr(
        sys, "argv", ["clearhead", *arguments, "--calibration-text", str(tmp_path / "book.txt"), "--json"]
    )
    with pytest.raises(SystemExit) as stopped:
        main()
    assert not stopped.value.code
    result = json.loads(capsys.readouterr().out)
    assert result["format"] == "native"
    assert result["loss"]["num_tokens"] > 0
    loaded, expected = load(tmp_path / "small", fast=False), copy_of(model)
    quantize_for_text(expected, TEXT, "int4")
    tokens = torch.tensor([model.encode(TEXT)[:20]])
    with torch.no_grad():
        assert torch.equal(loaded.network(tokens), expected.network(tokens))


def test_what_cannot_be_calibrated_is_refused(model):
    with pytest.raises(ClearheadError, match="at least 128"):
        quantize_for_text(copy_of(model), "short")
    with pytest.raises(ClearheadError, match="without a tokenizer"):
        quantize_for_text(Model(toy_network("gpt2")), TEXT)
    with pytest.raises(ClearheadError, match="only a decoder"):
        pack_for_text(toy_network("bert-base"), [1] * 2000, "int4")
    with pytest.raises(ClearheadError, match="already packed"):
        pack_for_text(pack_network(toy_network("gpt2"), "int4"), [1] * 2000, "int4")
