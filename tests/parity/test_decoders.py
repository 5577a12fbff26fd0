"""Decoder-only model types that are rows of a table, compared with transformers.

By default one case of each type runs through all comparisons at once; the slow tests run every setting through the
checks of the harness.
"""

import pytest
import torch

from clearhead.checkpoint.huggingface import load_folder, save_folder
from clearhead.families.decoders import ROWS
from tests.parity.decoder_cases import CASES, SETTINGS, VARIANTS, make_case
from tests.parity.generation import check_beams, check_greedy
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


@pytest.mark.parametrize("name", [row.model_type for row in ROWS if row.windows and row.windows.default_types])
def test_a_model_whose_layers_all_have_full_attention_is_saved(name, tmp_path):
    """transformers creates the mask of a window even if no layer has one."""
    settings = SETTINGS[name][0]
    layer_types = ["full_attention"] * settings["num_hidden_layers"]
    check_round_trip(make_case(name, 0, **settings | {"layer_types": layer_types}), tmp_path)


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
