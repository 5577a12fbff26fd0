"""Parameters of the MPT presets, counted on the meta device and compared with the model cards."""

import pytest

from clearhead.families import preset
from tests.families.counting import count_parameters

# Billions from the model cards; exact numbers were not found. The published shapes give 6.649 and 29.957: the first was
# rounded up, the second rounded down. With an untied head they would be 6.86 and 30.32.
PRINTED = {"mpt-7b": (6.7, 0.06), "mpt-7b-storywriter": (6.7, 0.06), "mpt-30b": (29.95, 0.01)}


@pytest.mark.parametrize(("name", "billions", "tolerance"), [(name, *row) for name, row in PRINTED.items()])
def test_number_of_parameters(name, billions, tolerance):
    assert abs(count_parameters(preset(name)) / 1e9 - billions) <= tolerance
