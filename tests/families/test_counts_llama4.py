"""Parameters of the Llama 4 presets, counted on the meta device and compared with the published numbers."""

import pytest
import torch
from transformers import Llama4VisionConfig, Llama4VisionModel

from clearhead.families import preset
from clearhead.model.transformer import Transformer

# `safetensors.total` of the first on the Hub, a provider's documentation of the second, from public repositories that
# quote them; the model cards give 109B and 400B. Both include the vision tower and its projector.
PUBLISHED = {"llama-4-scout": 108_641_793_536, "llama-4-maverick": 401_583_781_376}
VISION = {"hidden_size": 1408, "num_hidden_layers": 34, "intermediate_size": 5632, "vision_output_dim": 4096}
VISION |= {"projector_input_dim": 4096, "projector_output_dim": 4096, "image_size": 336, "patch_size": 14}


def count(network):
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize(("name", "published"), PUBLISHED.items())
def test_number_of_parameters(name, published):
    config = preset(name)
    with torch.device("meta"):
        network, tower = Transformer(config), Llama4VisionModel(Llama4VisionConfig(**VISION))
    projector = VISION["vision_output_dim"] * config.width
    assert count(network) + count(tower) + projector == published
