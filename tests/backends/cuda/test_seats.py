"""Every sampling option reaches the buffers that the GPU's kernels read; no GPU is needed to see that."""

from dataclasses import fields, replace

import pytest
import torch

from clearhead.backends.cuda.seats import SeatedSequence, Seats
from clearhead.options import SamplingOptions

VOCAB_SIZE = 20
BASE = SamplingOptions(temperature=1.0, seed=1)
# The engine counts tokens, stop strings belong to the text, and log-probabilities are computed from the logits.
ON_THE_HOST = {"max_new_tokens", "stop", "logprobs"}
CHANGES = {
    "min_new_tokens": {"min_new_tokens": 3},
    "temperature": {"temperature": 0.5},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.2},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "logit_bias": {"logit_bias": {7: 1.0}},
    "seed": {"seed": 2},
    "stop_ids": {"stop_ids": [3], "min_new_tokens": 1},
}


def buffers(options: SamplingOptions) -> list[torch.Tensor]:
    seats = Seats(num_seats=2, max_pages=4, vocab_size=VOCAB_SIZE, device=torch.device("cpu"))
    seats.assign([SeatedSequence(seat=1, num_tokens=3, pages=[0], options=options, tokens=[4, 5, 6])])
    zeros = torch.zeros(2, VOCAB_SIZE)
    optional = [zeros if each is None else each.float() for each in (seats.counts, seats.bias)]
    return [seats.integers.double(), seats.numbers.double(), *optional]


def test_each_option_is_chosen_on_the_host_or_tested_below():
    assert {each.name for each in fields(SamplingOptions)} == ON_THE_HOST | CHANGES.keys()


@pytest.mark.parametrize("name", CHANGES)
def test_option_changes_the_buffers_of_its_seat_only(name):
    base = replace(BASE, min_new_tokens=1) if name == "stop_ids" else BASE
    before, after = buffers(base), buffers(replace(base, **CHANGES[name]))
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
    first_seat = [(after[0][:, 0], before[0][:, 0]), (after[1][:, 0], before[1][:, 0])]
    first_seat += [(new[0], old[0]) for new, old in zip(after[2:], before[2:], strict=True)]
    assert all(torch.equal(new, old) for new, old in first_seat)
