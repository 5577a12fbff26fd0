"""Parameters of the BLOOM presets, counted on the meta device and compared with the published numbers."""

import pytest

from clearhead.families import preset
from tests.families.counting import count_parameters

# The first four: KerasHub's bloom_presets.py (github.com/keras-team/keras-hub).
PUBLISHED = {
    "bloom-560m": 559_214_592,
    "bloom-1b1": 1_065_314_304,
    "bloom-1b7": 1_722_408_960,
    "bloom-3b": 3_002_557_440,
    "bloom-7b1": 7_069_016_064,  # the table in the README of github.com/MrYxJ/calculate-flops.pytorch
    "bloom-176b": 176_247_271_424,  # the Hub's own test: huggingface.js, parse-safetensors-metadata.spec.ts
}


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_number_of_parameters(name, count):
    assert count_parameters(preset(name)) == count
