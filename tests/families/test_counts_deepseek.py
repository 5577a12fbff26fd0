"""Parameters of the DeepSeek presets, counted on the meta device and compared with the published numbers."""

import pytest
import torch

from clearhead.families import preset
from clearhead.model.transformer import Transformer

# The first two: `safetensors.total` on the Hub, from public tables that quote it. The third: audits of the release's
# safetensors headers, without the multi-token prediction layer and the float8 scales, with the routers' biases.
PUBLISHED = {
    "deepseek-v2-lite": 15_706_484_224,  # DeepSeek-V2, Appendix B: 15.7B
    "deepseek-v2": 235_741_434_880,  # DeepSeek-V2, §3.1.2: 236B
    "deepseek-v3": 671_026_419_200,  # DeepSeek-V3, §4.2: 671B
}


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_number_of_parameters(name, count):
    with torch.device("meta"):
        network = Transformer(preset(name))
    assert sum(tensor.numel() for tensor in (*network.parameters(), *network.buffers())) == count
