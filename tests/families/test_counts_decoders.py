"""The numbers of parameters of the presets in the decoder tables."""

import pytest

from clearhead.families import preset
from tests.families.counting import count_parameters

# `safetensors.total` on the Hub, or the sum over the shapes of its files
COUNTS = {
    "pythia-160m": 162_322_944,
    "gpt-j-6b": 6_050_882_784,
    "opt-125m": 125_239_296,
    "phi-2": 2_779_683_840,
    "phi-3-mini-4k": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "starcoder2-3b": 3_030_371_328,
    "stablelm-3b-4e1t": 2_795_443_200,
    "gemma-2b": 2_506_172_416,
    "gemma-2-2b": 2_614_341_888,
    "olmo-1b": 1_176_764_416,
    "olmo-2-1b": 1_484_916_736,
    "olmoe-1b-7b": 6_919_161_856,
    "mixtral-8x7b": 46_702_792_704,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "gpt-oss-20b": 20_914_757_184,
    "ernie-4.5-0.3b": 360_748_032,
}


@pytest.mark.parametrize("name", COUNTS)
def test_number_of_parameters(name):
    assert count_parameters(preset(name)) == COUNTS[name]
