"""Parameters of the BERT presets, counted on the meta device, against the published numbers."""

import pytest
import torch

from clearhead.families import preset
from clearhead.model.transformer import Transformer

# KerasHub's bert_presets.py (github.com/keras-team/keras-hub): embeddings, layers and pooler of the English uncased
# ones. Devlin et al. 2019 print 110M and 340M.
PUBLISHED = {"bert-base": 109_482_240, "bert-large": 335_141_888}


@pytest.mark.parametrize(("name", "published"), PUBLISHED.items())
def test_parameters(name, published):
    config = preset(name)
    with torch.device("meta"):
        network = Transformer(config)
    head = config.width * config.width + 3 * config.width + config.vocab_size  # dense, norm, the logits' bias
    assert sum(parameter.numel() for parameter in network.parameters()) == published + head
