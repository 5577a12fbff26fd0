"""Parameters of the Whisper presets, compared with transformers' class on the meta device and with the paper."""

import pytest
import torch
import transformers

from clearhead.families import preset, whisper
from tests.families.counting import count_parameters

MILLIONS = {  # Radford et al. 2022, Table 1; large-v3-turbo: its model card
    "whisper-tiny": 39,
    "whisper-base": 74,
    "whisper-small": 244,
    "whisper-medium": 769,
    "whisper-large-v3": 1550,
    "whisper-large-v3-turbo": 809,
}


def test_every_preset_has_a_published_count():
    assert whisper.PRESETS.keys() == MILLIONS.keys()


@pytest.mark.parametrize("name", MILLIONS)
def test_number_of_parameters(name):
    config = preset(name)
    with torch.device("meta"):
        theirs = transformers.WhisperForConditionalGeneration(
            transformers.WhisperConfig(**whisper.write_config(config))
        )
    count = sum(parameter.numel() for parameter in theirs.parameters())
    assert count_parameters(config) == count
    assert abs(count / 1e6 / MILLIONS[name] - 1) < 0.04  # the paper rounds, and leaves out the table of sinusoids
