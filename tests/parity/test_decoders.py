"""Decoder-only model types that are rows of a table, compared with transformers.

By default one case of each type runs through all comparisons at once; the slow tests run every setting through the
checks of the harness.
"""

import pytest
import torch

from clearhead.checkpoint.huggingface import load_folder, save_folder
from clearhead.families.decoders import ROWS
from clearhead.generation.beam import beam_search
from clearhead.generation.decoding import decode
from clearhead.generation.sequences import TokenSequence
from clearhead.options import BeamOptions, SamplingOptions
from tests.parity.decoder_cases import CASES, SETTINGS, VARIANTS
from tests.parity.harness import (
    build_reference,
    check_float64,
    check_logits,
    check_mutants,
    check_round_trip,
    largest_difference,
    load_network,
    make_inputs,
    run_reference,
)

ALL_CASES = [case for name in CASES for case in (CASES[name], *VARIANTS[name])]
NUM_NEW_TOKENS = 6


def test_every_row_has_a_case():
    assert list(SETTINGS) == [row.model_type for row in ROWS] or set(SETTINGS) == {row.model_type for row in ROWS}


@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_a_model_type_computes_what_transformers_computes(case, tmp_path):
    """Compare left-padded logits in float32 and float64 and greedy tokens; save, load and compare every tensor."""
    model = build_reference(case)
    network = load_network(model, tmp_path / "theirs")
    inputs = make_inputs(case, network.config, padded=True)
    with torch.no_grad():
        assert largest_difference(network(**inputs), run_reference(model, case, inputs), inputs) <= case.tolerance
    check_greedy(model, network, case, NUM_NEW_TOKENS)
    save_folder(network, tmp_path / "ours")
    reloaded = load_folder(tmp_path / "ours").network
    assert reloaded.config == network.config
    state = network.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in reloaded.state_dict().items())
    check_float64(case, tmp_path / "float64")


def check_greedy(model, network, case, count):
    """Compare the greedy continuations of a left-padded batch with transformers' generate."""
    inputs = make_inputs(case, network.config, padded=True)
    tokens, mask = inputs["tokens"], inputs["attention_mask"]
    length = tokens.shape[1]
    theirs = model.generate(
        input_ids=tokens, attention_mask=mask, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
    )[:, length:]
    prompts = [row[real.bool()].tolist() for row, real in zip(tokens, mask, strict=True)]
    sequences = [TokenSequence(prompt, SamplingOptions(max_new_tokens=count)) for prompt in prompts]
    for _ in decode(network, sequences):
        pass
    assert [sequence.tokens for sequence in sequences] == theirs.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL_CASES, ids=str)
@pytest.mark.parametrize("check", [check_logits, check_float64, check_round_trip])
def test_every_setting_agrees(case, check, tmp_path):
    check(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_every_error_in_one_field_is_detected(case, tmp_path):
    assert check_mutants(case, tmp_path) >= 12


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_forty_greedy_tokens_and_four_beams_agree(case, tmp_path):
    model = build_reference(case)
    network = load_network(model, tmp_path)
    check_greedy(model, network, case, 40)
    check_beams(model, network, case, 12)


@pytest.mark.parametrize("name", ["mixtral", "gemma2", "gpt_neox"])
def test_four_beams_agree(name, tmp_path):
    model = build_reference(CASES[name])
    check_beams(model, load_network(model, tmp_path), CASES[name], 6)


def check_beams(model, network, case, count):
    """Compare the best of four beams for a left-padded batch with transformers' generate."""
    inputs = make_inputs(case, network.config, padded=True)
    tokens, mask = inputs["tokens"], inputs["attention_mask"]
    options = {"num_beams": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    theirs = model.generate(input_ids=tokens, attention_mask=mask, max_new_tokens=count, **options)[
        :, tokens.shape[1] :
    ]
    prompts = [row[real.bool()].tolist() for row, real in zip(tokens, mask, strict=True)]
    found = beam_search(network, prompts, BeamOptions(num_beams=4, max_new_tokens=count))
    assert [beams[0].tokens for beams in found] == theirs.tolist()
