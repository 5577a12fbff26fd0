"""Parameters of the LLaMA presets, counted on the meta device and compared with the published numbers."""

import pytest

from clearhead.families import llama, preset
from tests.families.counting import count_parameters

# KerasHub: the presets files of github.com/keras-team/keras-hub. Hub: `safetensors.total` of the Hub's model API, from
# public repositories that quote it. Rounded numbers: Touvron et al. 2023a, Table 2, and the model cards.
PUBLISHED = {
    "llama-7b": 6_738_415_616,  # KerasHub; 6.7B
    "llama-13b": 13_015_864_320,  # as Llama 2; 13.0B
    "llama-30b": 32_528_943_616,  # docs/quant of github.com/juncongmoo/pyllama; 32.5B
    "llama-65b": 65_285_660_672,  # likewise; 65.2B, rounded down
    "llama-2-7b": 6_738_415_616,  # KerasHub
    "llama-2-13b": 13_015_864_320,  # Hub: 13,015,866,880 with 64 rotary frequencies in each of 40 layers
    "llama-2-70b": 68_976_648_192,  # Hub: 68,976,653,312 with 64 rotary frequencies in each of 80 layers
    "llama-3-8b": 8_030_261_248,  # KerasHub
    "llama-3-70b": 70_553_706_496,  # as Llama 3.1
    "llama-3.1-8b": 8_030_261_248,  # Hub
    "llama-3.1-70b": 70_553_706_496,  # Hub
    "llama-3.1-405b": 405_853_388_800,  # Hub
    "llama-3.2-1b": 1_235_814_400,  # Hub
    "llama-3.2-3b": 3_212_749_824,  # Hub
    "llama-3.3-70b": 70_553_706_496,  # Hub
    "smollm2-135m": 134_515_008,  # Hub, as the next three
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "smollm3-3b": 3_075_098_624,
    "mistral-7b": 7_241_732_096,  # KerasHub, as the next two
    "mistral-7b-v0.2": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
}


def test_every_preset_has_a_published_count():
    assert PUBLISHED.keys() == llama.PRESETS.keys()


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_number_of_parameters(name, count):
    assert count_parameters(preset(name)) == count
