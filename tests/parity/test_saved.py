"""Whatever a config.json is written for, transformers computes as we do: every config one field away is tried."""

import json
from dataclasses import replace

import pytest
import torch
import transformers

from clearhead.architecture import Rope
from clearhead.checkpoint.huggingface import load_folder, save_folder
from clearhead.errors import ClearheadError
from clearhead.families import family_for
from clearhead.families.gemma import gemma3_preset
from clearhead.families.llama import llama_config
from clearhead.model.transformer import Transformer
from tests.parity import test_bart, test_deepseek, test_llama, test_mpt
from tests.parity.harness import VOCAB, Case, build, difference, inputs, load_ours, rerandomize, run_reference
from tests.parity.mutants import mutants

ALL_CASES = [*test_llama.CASES, *test_mpt.CASES, *test_bart.CASES, *test_deepseek.CASES]
TRIED = ("llama-bias", "mistral", "smollm3", "mpt-clipped", "marian-relu", "v2-lite-greedy")


def saved_as_theirs(network, folder):
    save_folder(network, folder)
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    model, report = getattr(transformers, name).from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    assert not report["unexpected_keys"]
    assert not report["missing_keys"]
    return model.eval()


def can_be_saved(config):
    try:
        return family_for(config)
    except ClearheadError:
        return None


def test_a_width_that_transformers_refuses_is_refused_at_once():
    """One more, and heads of their own width would still do for us."""
    config = gemma3_preset(48, 2, 4, 1, 64, head_width=16)()
    assert can_be_saved(config)
    scaled = replace(config.decoder.embedding, scale=49**0.5)
    assert not can_be_saved(replace(config, width=49, decoder=replace(config.decoder, embedding=scaled)))


def test_no_layer_with_positions(tmp_path):
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
    theirs, tokens = saved_as_theirs(network, tmp_path), torch.arange(20)[None]
    assert load_folder(tmp_path).network.config == config
    with torch.no_grad():
        assert (network(tokens) - theirs(input_ids=tokens).logits).abs().max() <= 5e-5


@pytest.mark.parametrize("case", [case for case in ALL_CASES if case.name in TRIED], ids=str)
def test_what_is_saved_is_what_transformers_computes(case: Case, tmp_path):
    config = load_ours(build(case), tmp_path / "theirs").config
    sayable = [one for one in (config, *dict(mutants(config)).values()) if can_be_saved(one)]
    assert len(sayable) > 3
    for number, one in enumerate(sayable):
        torch.manual_seed(number)
        network = Transformer(one).eval()
        rerandomize(network, lambda name, parameter: None)
        theirs = saved_as_theirs(network, tmp_path / str(number))
        given = inputs(case, one, padded=True)
        with torch.no_grad():
            assert difference(network(**given), run_reference(theirs, case, given), given) <= 5e-5
