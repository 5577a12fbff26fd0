"""Parameters of the LLaMA presets, counted on the meta device, against the published numbers."""

import pytest
import torch

from clearhead.families import preset
from clearhead.model.transformer import Transformer

# Whole numbers as remembered of the releases, not looked up; what the papers print, rounded, stands beside them.
PUBLISHED = {
    "llama-7b": 6_738_415_616,  # Touvron et al. 2023a, Table 2: 6.7B
    "llama-13b": 13_015_864_320,  # 13.0B
    "llama-30b": 32_528_943_616,  # 32.5B
    "llama-65b": 65_285_660_672,  # 65.2B
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "smollm3-3b": 3_075_098_624,
    "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.2": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
}


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_parameters(name, count):
    with torch.device("meta"):
        network = Transformer(preset(name))
    assert sum(parameter.numel() for parameter in network.parameters()) == count
