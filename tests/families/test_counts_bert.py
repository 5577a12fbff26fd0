"""Parameters of the BERT presets, counted on the meta device and compared with the published numbers."""

import pytest

from clearhead.families import preset
from tests.families.counting import count_parameters

# KerasHub's bert_presets.py (github.com/keras-team/keras-hub): embeddings, layers and pooler of the English uncased
# models. Devlin et al. 2019 give 110M and 340M.
PUBLISHED = {"bert-base": 109_482_240, "bert-large": 335_141_888}


@pytest.mark.parametrize(("name", "published"), PUBLISHED.items())
def test_number_of_parameters(name, published):
    config = preset(name)
    head = config.width * config.width + 3 * config.width + config.vocab_size  # dense layer, norm, logit bias
    assert count_parameters(config) == published + head
