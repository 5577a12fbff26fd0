"""FLOPs of the recurrent baseline against PyTorch's own counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from clearhead.costs import recurrent_flops
from clearhead.model import RecurrentConfig, RecurrentTranslator

SOURCE, TARGET, BATCH = 7, 5, 2


@pytest.mark.parametrize("cell", ["tanh", "gru", "lstm"])
@pytest.mark.parametrize("attention", ["none", "dot_product"])
@pytest.mark.parametrize(("bidirectional", "num_layers"), [(False, 1), (True, 1), (True, 2)])
def test_flops_equal_those_that_pytorch_counts(cell, attention, bidirectional, num_layers):
    config = RecurrentConfig(
        source_vocab_size=11,
        target_vocab_size=13,
        embedding_width=6,
        width=8,
        num_layers=num_layers,
        cell=cell,
        attention=attention,
        bidirectional=bidirectional,
        context=16,
    )
    network = RecurrentTranslator(config).eval().double()  # in float32, the LSTM is one operation of oneDNN
    source, target = (torch.zeros(BATCH, length, dtype=torch.long) for length in (SOURCE, TARGET))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(source, target)
    parts = recurrent_flops(config, source=SOURCE, target=TARGET, batch=BATCH)
    assert sum(parts.values()) == counter.get_total_flops()
    assert (parts["attention"] > 0) == (attention == "dot_product")
