"""The worked example in docs/add-a-family.md: its code runs, and the family it adds passes all checks."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import transformers

from clearhead import families
from clearhead.errors import ClearheadError
from clearhead.families import Settings, family_for, preset
from tests.families.test_defaults import check_absent_settings
from tests.parity.harness import check_float64, check_logits, check_mutants, check_round_trip

PAGE = Path(__file__).parents[2] / "docs" / "add-a-family.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
LISTING, FAMILY, NETWORK_LISTING, PARITY_TEST, COUNT_TEST = BLOCKS


def run_block(block: str, name: str) -> ModuleType:
    """Run a block of the page as the module that the page says it is."""
    module = ModuleType(name)
    exec(compile(block, f"{PAGE.name}: {name}", "exec"), vars(module))
    return module


@pytest.fixture
def phi3(monkeypatch):
    """Return the module of the page, registered as the page says."""
    module = run_block(FAMILY, "clearhead.families.phi3")
    monkeypatch.setitem(sys.modules, "clearhead.families.phi3", module)
    monkeypatch.setattr(families, "FAMILIES", (*families.FAMILIES, module.FAMILY))
    return module


PARITY = run_block(PARITY_TEST, "tests.parity.test_phi3")


def test_the_listing_shows_the_fused_matrices(capsys):
    run_block(LISTING, "listing")
    assert "model.layers.0.self_attn.qkv_proj.weight (96, 48)" in capsys.readouterr().out


def test_the_second_listing_shows_the_names_in_the_network(capsys):
    run_block(NETWORK_LISTING, "network_listing")
    assert "decoder.embedding.tokens.weight (32000, 4096)" in capsys.readouterr().out


@pytest.mark.parametrize("case", PARITY.CASES, ids=str)
@pytest.mark.parametrize("check", [check_logits, check_float64, check_round_trip])
def test_parity(case, check, phi3, tmp_path):
    PARITY.test_parity(case, check, tmp_path)


@pytest.mark.parametrize("case", PARITY.CASES, ids=str)
def test_every_error_in_one_field_is_detected(case, phi3, tmp_path):
    assert check_mutants(case, tmp_path) >= 12


def test_the_page_runs_all_four_checks():
    (checks,) = (mark.args[1] for mark in PARITY.test_parity.pytestmark if mark.args[0] == "check")
    assert checks == [check_logits, check_float64, check_round_trip, check_mutants]


def test_number_of_parameters(phi3):
    run_block(COUNT_TEST, "tests.families.test_counts_phi3").test_number_of_parameters()


def test_the_preset_reads_back_and_is_written_by_this_family(phi3):
    config = preset("phi-3-mini-4k")
    data = phi3.write_config(config)
    assert phi3.read_config(Settings(data, "written")) == config
    assert transformers.Phi3Config(**data).sliding_window == 2047


def test_absent_settings_have_the_defaults_of_transformers(phi3):
    check_absent_settings(phi3.FAMILY, "phi3")


def test_unsupported_settings_are_rejected(phi3):
    data = phi3.write_config(preset("phi-3-mini-4k"))
    for wrong in ({"partial_rotary_factor": 0.5}, {"rope_parameters": {"rope_type": "longrope"}}):
        with pytest.raises(ClearheadError, match=r"partial_rotary_factor|longrope"):
            phi3.read_config(Settings(data | wrong, "config.json"))


def test_a_plain_llama_is_still_written_as_llama(phi3):
    """Other families come first in FAMILIES, so registering a new one does not change what they write."""
    assert family_for(preset("llama-7b")).name == "llama"
