"""The worked example in docs/add-a-family.md: its code runs, and the family it adds passes all checks."""

import re
from pathlib import Path
from types import ModuleType

import pytest
import transformers

from clearhead import families
from clearhead.errors import ClearheadError
from clearhead.families import Settings, family_for, preset
from clearhead.families.decoder_writing import decoder_family
from tests.families.test_defaults import check_absent_settings
from tests.parity.harness import check_float64, check_logits, check_mutants, check_round_trip

PAGE = Path(__file__).parents[2] / "docs" / "add-a-family.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
LISTING, ROW, NETWORK_LISTING, PARITY_TEST, COUNT_TEST = BLOCKS


def run_block(block: str, name: str) -> ModuleType:
    """Run a block of the page as a module."""
    module = ModuleType(name)
    exec(compile(block, f"{PAGE.name}: {name}", "exec"), vars(module))
    return module


@pytest.fixture
def persimmon(monkeypatch):
    """Return the family of the page's row, registered as the page says."""
    family = decoder_family(run_block(ROW, "row").PERSIMMON)
    monkeypatch.setattr(families, "FAMILIES", (*families.FAMILIES, family))
    return family


CASES = run_block(PARITY_TEST, "parity").CASES


def test_the_listing_shows_the_fused_matrix(capsys):
    run_block(LISTING, "listing")
    assert "model.layers.0.self_attn.query_key_value.weight (144, 48)" in capsys.readouterr().out


def test_the_second_listing_shows_the_names_in_the_network(capsys):
    run_block(NETWORK_LISTING, "network_listing")
    assert "decoder.embedding.tokens.weight (32000, 4096)" in capsys.readouterr().out


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("check", [check_logits, check_float64, check_round_trip, check_mutants])
def test_parity(case, check, persimmon, tmp_path):
    check(case, tmp_path)


def test_number_of_parameters(persimmon):
    run_block(COUNT_TEST, "counts").test_number_of_parameters()


def test_the_preset_reads_back_and_is_written_by_this_family(persimmon):
    config = preset("persimmon-8b")
    data = persimmon.write_config(config)
    assert persimmon.read_config(Settings(data, "written")) == config
    assert family_for(config) is persimmon
    assert transformers.PersimmonConfig(**data).hidden_act == "relu2"


def test_absent_settings_have_the_defaults_of_transformers(persimmon):
    check_absent_settings(persimmon, "persimmon")


def test_unsupported_settings_are_rejected(persimmon):
    data = persimmon.write_config(preset("persimmon-8b"))
    with pytest.raises(ClearheadError, match="longrope"):
        persimmon.read_config(Settings(data | {"rope_parameters": {"rope_type": "longrope"}}, "config.json"))


def test_a_plain_llama_is_still_written_as_llama(persimmon):
    """Other families come first in FAMILIES, so registering a new one does not change what they write."""
    assert family_for(preset("llama-3.1-8b")).name == "llama"
