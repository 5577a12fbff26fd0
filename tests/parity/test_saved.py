"""Every config.json that we write gives the same logits in transformers, also for configs that differ in one field."""

import json
from dataclasses import replace

import pytest
import torch
import transformers

from clearhead.architecture import Rope
from clearhead.checkpoint.huggingface import load_folder, save_folder
from clearhead.errors import ClearheadError
from clearhead.families import family_for, preset, presets, shrink
from clearhead.families.gemma import gemma3_preset
from clearhead.families.llama import llama_config
from clearhead.model.transformer import Transformer
from tests.parity import test_bart, test_deepseek, test_llama, test_mpt
from tests.parity.harness import (
    VOCAB,
    Case,
    build_reference,
    largest_difference,
    load_network,
    make_inputs,
    randomize,
    run_reference,
)
from tests.parity.mutants import mutants

ALL_CASES = [*test_llama.CASES, *test_mpt.CASES, *test_bart.CASES, *test_deepseek.CASES]
TRIED_CASES = ("llama-bias", "mistral", "smollm3", "mpt-clipped", "marian-relu", "v2-lite-greedy")


def save_for_transformers(network, folder, ignored=()):
    """Save our network and return the model that transformers loads; `ignored`: ends of names it may lack or have."""
    save_folder(network, folder)
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    model, report = getattr(transformers, name).from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    assert not {key for key in report["unexpected_keys"] if not key.endswith(ignored)}
    assert not {key for key in report["missing_keys"] if not key.endswith(ignored)}
    return model.eval()


def can_be_saved(config):
    """Return whether a family can write this config."""
    try:
        family_for(config)
    except ClearheadError:
        return False
    return True


def test_a_width_that_transformers_rejects_is_not_saved():
    """A width that is not a multiple of the heads works for us, since heads have a width of their own."""
    config = gemma3_preset(48, 2, 4, 1, 64, head_width=16)()
    assert can_be_saved(config)
    scaled = replace(config.decoder.embedding, scale=49**0.5)
    assert not can_be_saved(replace(config, width=49, decoder=replace(config.decoder, embedding=scaled)))


def test_a_model_without_any_rotary_layer_is_saved(tmp_path):
    config = llama_config(
        width=48,
        num_layers=2,
        num_heads=4,
        feed_forward=64,
        vocab_size=VOCAB,
        context=32,
        rope=Rope(),
        rotated=(False,) * 2,
    )
    torch.manual_seed(0)
    network = Transformer(config).eval()
    theirs, tokens = save_for_transformers(network, tmp_path), torch.arange(20)[None]
    assert load_folder(tmp_path).network.config == config
    with torch.no_grad():
        assert (network(tokens) - theirs(input_ids=tokens).logits).abs().max() <= 5e-5


@pytest.mark.parametrize("case", [case for case in ALL_CASES if case.name in TRIED_CASES], ids=str)
def test_transformers_computes_the_same_from_every_saved_config(case: Case, tmp_path):
    config = load_network(build_reference(case), tmp_path / "theirs").config
    configs = [candidate for candidate in (config, *dict(mutants(config)).values()) if can_be_saved(candidate)]
    assert len(configs) > 3
    for number, config in enumerate(configs):
        torch.manual_seed(number)
        network = Transformer(config).eval()
        randomize(network)
        theirs = save_for_transformers(network, tmp_path / str(number))
        inputs = make_inputs(case, config, padded=True)
        with torch.no_grad():
            assert largest_difference(network(**inputs), run_reference(theirs, case, inputs), inputs) <= 5e-5


def check_a_tiny_preset(name, folder):
    """Save a preset at toy size and compare the parameters that transformers loads, or find it refused."""
    torch.manual_seed(0)
    network = Transformer(shrink(preset(name))).eval()
    if not can_be_saved(network.config):
        assert name.startswith(WITHOUT_A_FORM)
        with pytest.raises(ClearheadError, match="save it as native"):
            save_folder(network, folder)
        return
    model = save_for_transformers(network, folder, IGNORED)
    if name.startswith(
        ("whisper", "mpt-7b-storywriter")
    ):  # one reads audio; of the other, transformers ignores alibi_bias_max
        return
    tokens = torch.randint(0, 256, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        if network.config.is_encoder_decoder:
            ours, theirs = network(tokens, tokens), model(tokens, decoder_input_ids=tokens)
        else:
            ours, theirs = network(tokens), model(tokens)
    theirs = theirs.last_hidden_state if "last_hidden_state" in theirs else theirs.logits
    assert (ours.reshape(theirs.shape) - theirs).abs().max() <= 1e-4


# BERT's pooler, which transformers has no use for beside a language head, and computed sinusoids
IGNORED = ("pooler.dense.weight", "pooler.dense.bias", "embed_positions.weight")
# Models that transformers has no class for, or that cannot be written for it
WITHOUT_A_FORM = ("grok", "gpt3", "led", "transformer", "annotated-transformer", "gopher", "palm")


@pytest.mark.parametrize(
    "name", ["deepseek-v3", "deberta-v3-small", "distilbert-base", "nomic-embed-v1.5", "gopher-44m"]
)
def test_a_tiny_preset_loads_in_transformers_or_is_refused(name, tmp_path):
    check_a_tiny_preset(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", presets())
def test_every_tiny_preset_loads_in_transformers_or_is_refused(name, tmp_path):
    check_a_tiny_preset(name, tmp_path)
