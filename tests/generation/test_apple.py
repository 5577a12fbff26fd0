"""A model on a simulated Apple GPU, which has no float64, gives the same results as on the CPU."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from clearhead.api import create, load
from clearhead.errors import ClearheadError
from clearhead.generation.plain import decode_plainly
from clearhead.options import SamplingOptions
from tests.checkpoint.tiny import tiny_config
from tests.generation.apple import AppleGpu
from tests.generation.test_text_generator import byte_model, translation_model

PROMPTS = ["hello", "a", "hello"]
SAMPLED = {"temperature": 1.0, "seed": 3}
FILTERS = {"top_k": 30, "top_p": 0.9, "min_p": 0.01}
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2, "logit_bias": {7: 1.5}}


def results(generations):
    return [(each.tokens, each.text, each.logprobs, each.score and round(each.score, 5)) for each in generations]


def on_apple(model):
    """Return a copy on the device `mps`; call and use it within an AppleGpu context."""
    network = deepcopy(model.network).to("mps")
    assert network.device.type == "mps"
    return replace(model, network=network)


def check_same_on_apple(model, run):
    expected = run(model)
    with AppleGpu():
        assert run(on_apple(model)) == expected


def test_the_simulated_gpu_has_no_float64_and_does_not_mix_devices():
    with AppleGpu():
        ones = torch.ones(2, device="mps")
        assert (ones + ones).tolist() == [2, 2]
        with pytest.raises(TypeError, match="float64"):
            ones.double()
        with pytest.raises(RuntimeError, match="tensors on mps and on cpu"):
            ones + torch.ones(2)


@pytest.mark.parametrize(
    "options",
    [
        {},
        SAMPLED,
        {**SAMPLED, **FILTERS, "n": 2},
        {**PENALTIES, "min_new_tokens": 3, "logprobs": 2},
        {"beams": 3, "n": 2},
        {"speculate": "lookup"},
        {**SAMPLED, **FILTERS, "speculate": "lookup"},
    ],
    ids=str,
)
def test_generated_texts(options):
    check_same_on_apple(byte_model(), lambda model: results(model.generate_many(PROMPTS, max_new_tokens=6, **options)))


def test_a_draft_model():
    model, draft = byte_model(), byte_model(seed=1)

    def run(model):
        local_draft = draft if model.network.device.type == "cpu" else on_apple(draft)
        return results([model.generate("hello", max_new_tokens=6, speculate=local_draft, **SAMPLED)])

    check_same_on_apple(model, run)


@pytest.mark.parametrize("options", [{}, {"beams": 3}, {"speculate": "lookup"}], ids=str)
def test_answers_of_an_encoder_decoder(options):
    model, prompts = translation_model(), [[3, 7, 1, 9, 11], [4], [12, 6, 8]]
    model.network.float()
    check_same_on_apple(model, lambda model: results(model.generate_many(prompts, max_new_tokens=8, **options)))


def test_scores_embeddings_and_streams():
    def run(model):
        options = SamplingOptions(max_new_tokens=5, top_p=0.8, **SAMPLED)
        plain = list(decode_plainly(model.network, [1, 2, 3], options))
        return model.score("hello"), model.embed(PROMPTS).tolist(), list(model.stream("hello", max_new_tokens=8)), plain

    check_same_on_apple(byte_model(), run)


def test_create_and_load_place_a_model_on_an_apple_gpu(tmp_path):
    saved = create(tiny_config()).save(tmp_path / "saved")
    expected = load(saved).generate([1, 2, 3], max_new_tokens=5).tokens
    with AppleGpu():
        for model in (load(saved, device="mps"), create(tiny_config(), device="mps")):
            assert model.network.device.type == "mps"
            assert model.generate([1, 2, 3], max_new_tokens=5).tokens == expected


def test_float64_raises_on_an_apple_gpu(tmp_path):
    saved = create(tiny_config()).save(tmp_path / "saved")
    with AppleGpu():
        for call in (lambda: load(saved, "float64", "mps"), lambda: create(tiny_config(), None, 0, "float64", "mps")):
            with pytest.raises(ClearheadError, match="Apple's GPUs do not support float64; use float32, or"):
                call()


def test_a_gguf_file_runs_on_an_apple_gpu_from_its_stored_blocks(smollm2_gguf):
    expected = load(smollm2_gguf, weights="stored", fast=False).generate("The sea", max_new_tokens=3).tokens
    with AppleGpu():
        model = load(smollm2_gguf, weights="stored", device="mps")
        assert model.generate("The sea", max_new_tokens=3).tokens == expected
