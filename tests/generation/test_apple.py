"""A model on Apple's GPU, which has no float64, gives what it gives on the processor."""

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
from tests.generation.test_text_generator import speaking, translating

PROMPTS = ["hello", "a", "hello"]
DRAWN = {"temperature": 1.0, "seed": 3}
FILTERS = {"top_k": 30, "top_p": 0.9, "min_p": 0.01}
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2, "logit_bias": {7: 1.5}}


def told(made):
    return [(one.tokens, one.text, one.logprobs, one.score and round(one.score, 5)) for one in made]


def moved(model):
    """To be called, and used, on an AppleGpu."""
    network = deepcopy(model.network).to("mps")
    assert network.device.type == "mps"
    return replace(model, network=network)


def same_on_apple(model, ask):
    expected = ask(model)
    with AppleGpu():
        assert ask(moved(model)) == expected


def test_there_is_no_float64():
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
        DRAWN,
        {**DRAWN, **FILTERS, "n": 2},
        {**PENALTIES, "min_new_tokens": 3, "logprobs": 2},
        {"beams": 3, "n": 2},
        {"speculate": "lookup"},
        {**DRAWN, **FILTERS, "speculate": "lookup"},
    ],
    ids=str,
)
def test_texts(options):
    same_on_apple(speaking(), lambda model: told(model.generate_many(PROMPTS, max_new_tokens=6, **options)))


def test_a_draft_model_there():
    model, draft = speaking(), speaking(seed=1)

    def ask(model):
        here = draft if model.network.device.type == "cpu" else moved(draft)
        return told([model.generate("hello", max_new_tokens=6, speculate=here, **DRAWN)])

    same_on_apple(model, ask)


@pytest.mark.parametrize("options", [{}, {"beams": 3}, {"speculate": "lookup"}], ids=str)
def test_answers_of_an_encoder_decoder(options):
    model, prompts = translating(), [[3, 7, 1, 9, 11], [4], [12, 6, 8]]
    model.network.float()
    same_on_apple(model, lambda model: told(model.generate_many(prompts, max_new_tokens=8, **options)))


def test_reading_and_streaming():
    def ask(model):
        options = SamplingOptions(max_new_tokens=5, top_p=0.8, **DRAWN)
        plain = list(decode_plainly(model.network, [1, 2, 3], options))
        return model.score("hello"), model.embed(PROMPTS).tolist(), list(model.stream("hello", max_new_tokens=8)), plain

    same_on_apple(speaking(), ask)


def test_created_and_loaded_there(tmp_path):
    saved = create(tiny_config()).save(tmp_path / "saved")
    expected = load(saved).generate([1, 2, 3], max_new_tokens=5).tokens
    with AppleGpu():
        for model in (load(saved, device="mps"), create(tiny_config(), device="mps")):
            assert model.network.device.type == "mps"
            assert model.generate([1, 2, 3], max_new_tokens=5).tokens == expected


def test_float64_is_refused_there(tmp_path):
    saved = create(tiny_config()).save(tmp_path / "saved")
    with AppleGpu():
        for call in (lambda: load(saved, "float64", "mps"), lambda: create(tiny_config(), None, 0, "float64", "mps")):
            with pytest.raises(ClearheadError, match="Apple's GPUs have no float64; float32 is the widest there"):
                call()


def test_a_file_runs_there_from_its_own_blocks(smollm2_gguf):
    expected = load(smollm2_gguf, weights="stored", fast=False).generate("The sea", max_new_tokens=3).tokens
    with AppleGpu():
        model = load(smollm2_gguf, weights="stored", device="mps")
        assert model.generate("The sea", max_new_tokens=3).tokens == expected
