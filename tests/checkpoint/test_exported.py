"""Networks as graphs: torch.export and ONNX files give the logits of the network for other batches and lengths."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from clearhead.api import create, save_onnx
from clearhead.architecture import Experts
from clearhead.backends import accelerate, pack_network
from clearhead.errors import ClearheadError
from clearhead.families import preset
from clearhead.model import MixtureLayer
from tests.checkpoint.tiny import tiny_config
from tests.parity.harness import randomize

BATCH, LENGTH, TARGET = 3, 13, 9  # others than those that are traced
# One preset for each kind of network: windows, sinks, latent attention, distances, shared layers, positions as biases
KINDS = (
    "gpt2",
    "gemma-2-2b",
    "bloom-560m",
    "pythia-160m",
    "deepseek-v2-lite",
    "deepseek-v3",
    "gpt-oss-20b",
    "llama-4-scout",
    "t5-small",
)
KINDS += (
    "modernbert-base",
    "deberta-v3-small",
    "albert-base",
    "nomic-embed-v1.5",
    "bart-base",
    "mixtral-8x7b",
)


def toy(name):
    """Return a model of a preset at toy size, with all weights drawn anew."""
    model = create(name, tiny=True)
    torch.manual_seed(1)
    randomize(model.network)
    return model


def toy_inputs(model):
    """Return inputs by their exported names, with padding, and what our network computes from them."""
    config, generator = model.config, torch.Generator().manual_seed(2)
    tokens = torch.randint(3, config.vocab_size, (BATCH, LENGTH), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0  # left of decoders
    if config.encoder is not None:
        mask = mask.flip(1)
    inputs = {"input_ids": tokens, "attention_mask": mask}
    with torch.no_grad():
        if config.is_encoder_decoder:
            target = tokens[:, :TARGET].flip(1).contiguous()
            return inputs | {"decoder_input_ids": target}, model.network(tokens, target, mask)
        if config.output_stack.embedding.num_token_types:
            types = tokens % 2
            return inputs | {"token_type_ids": types}, model.network(tokens, mask, token_types=types)
        return inputs, model.network(tokens, mask)


def check_output(output, expected, inputs):
    """Compare the outputs at real tokens."""
    is_real = inputs["attention_mask"].bool() if "decoder_input_ids" not in inputs else ...
    assert output.shape == expected.shape
    largest = expected.abs().max()
    assert largest > 0.1
    assert (output - expected)[is_real].abs().max() <= 1e-5 * max(1, largest / 4)


def check_onnx(model, path):
    """Compare what onnxruntime computes from a written file with the network in float64.

    In float32, both may be off by nearly the tolerance, in opposite directions (DeepSeek-V2).
    """
    import onnxruntime

    inputs, _ = toy_inputs(model)
    assert save_onnx(model, path) == [path]
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert {each.name for each in session.get_inputs()} == inputs.keys()
    expected_name = "last_hidden_state" if model.network.head is None else "logits"
    assert [each.name for each in session.get_outputs()] == [expected_name]
    (output,) = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
    assert output.dtype == np.float32
    model.network.double()
    check_output(torch.from_numpy(output), toy_inputs(model)[1], inputs)


def test_a_decoder_is_exported_with_any_batch_and_length():
    model = toy("llama-3.2-1b")
    accelerate(model.network, build=False)  # a graph of the modules, also if the kernels run elsewhere
    program, (inputs, expected) = model.export(), toy_inputs(model)
    check_output(program.module()(**inputs), expected, inputs)


def test_onnxruntime_computes_the_logits_of_an_encoder(tmp_path):
    check_onnx(toy("bert-base"), tmp_path / "bert.onnx")


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["llama-3.2-1b", *KINDS])
def test_onnxruntime_computes_the_logits_of_every_kind(preset, tmp_path):
    check_onnx(toy(preset), tmp_path / "model.onnx")


@pytest.mark.slow
@pytest.mark.parametrize("preset", KINDS)
def test_torch_exports_every_kind(preset):
    model = toy(preset)
    program, (inputs, expected) = model.export(), toy_inputs(model)
    check_output(program.module()(**inputs), expected, inputs)


def test_a_mixture_computes_the_same_from_all_experts_as_from_the_chosen_ones():
    mixtures = [
        layer.feed_forward for name in ("mixtral-8x7b", "llama-4-scout") for layer in preset(name).decoder.layers
    ]
    configs = [shrunk(config) for config in {*mixtures} if isinstance(config, Experts)]
    # Llama 4 weighs the inputs of its experts; with biases, an expert that was not chosen gives something from nothing.
    configs += [replace(config, expert=replace(config.expert, bias=True)) for config in configs]
    assert {config.router.weighs for config in configs} == {"input", "output"}
    for config in configs:
        torch.manual_seed(1)
        layer, tokens = MixtureLayer(config, width=16), torch.randn(5, 16)
        randomize(layer)
        with torch.no_grad():
            weights, chosen = layer.router(tokens)
            expected = layer.run_chosen(tokens, weights, chosen)
            assert expected.abs().max() > 0.1
            torch.testing.assert_close(layer.run_all(tokens, weights, chosen), expected, rtol=1e-5, atol=1e-5)


def shrunk(config):
    """Return a mixture of small experts."""
    return replace(config, num_experts=4, expert=replace(config.expert, width=12), shared=None)


def test_what_cannot_be_exported_is_refused_in_a_sentence(tmp_path, monkeypatch):
    model = create(tiny_config())
    with pytest.raises(ClearheadError, match="unsupported extension"):
        save_onnx(model, tmp_path / "model.bin")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    monkeypatch.setattr("clearhead.checkpoint.exported.find_spec", lambda name: None)
    with pytest.raises(ClearheadError, match=r"onnx and onnxscript; run: pip install 'clearhead\[onnx\]'"):
        save_onnx(model, tmp_path / "model.onnx")
    pack_network(model.network, "int8")
    with pytest.raises(ClearheadError, match="packed weights"):
        model.export()
    assert not list(tmp_path.iterdir())
