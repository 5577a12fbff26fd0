"""Parameters of the GPT presets, counted on the meta device and compared with the published numbers."""

import pytest

from clearhead.families import preset
from tests.families.counting import count_parameters

# GPT-2: KerasHub's gpt2_presets.py (github.com/keras-team/keras-hub). The others: counts of the released models in
# transformers, from public logs.
PUBLISHED = {
    "gpt1": 116_534_784,  # the paper gives 117M
    "gpt2": 124_439_808,  # Radford et al. 2019 give 117M, 345M, 762M, 1542M; the release corrects them
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt-neo-125m": 125_198_592,
    "gpt-neo-1.3b": 1_315_575_808,
    "gpt-neo-2.7b": 2_651_307_520,
}
# Brown et al. 2020, Table 2.1: the published number, and the tolerance: half of its last digit unless noted.
PRINTED = {
    "gpt3-125m": (125e6, 0.5e6),
    "gpt3-350m": (350e6, 6e6),  # the published shape is that of GPT-2 medium, 355M; the name is rounded down
    "gpt3-760m": (760e6, 0.5e6),
    "gpt3-1.3b": (1.3e9, 0.05e9),
    "gpt3-2.7b": (2.7e9, 0.05e9),
    "gpt3-6.7b": (6.7e9, 0.05e9),
    "gpt3-13b": (13.0e9, 0.15e9),  # 13.0 comes from the published width 5140; 40 heads of 128 give 5120, hence 12.85
    "gpt3-175b": (175.0e9, 0.5e9),  # the published shape gives 174.6
}


@pytest.mark.parametrize(("name", "published"), PUBLISHED.items())
def test_number_of_parameters(name, published):
    assert count_parameters(preset(name)) == published


@pytest.mark.parametrize(("name", "printed", "tolerance"), [(name, *row) for name, row in PRINTED.items()])
def test_number_of_parameters_of_gpt3(name, printed, tolerance):
    assert abs(count_parameters(preset(name)) - printed) <= tolerance
