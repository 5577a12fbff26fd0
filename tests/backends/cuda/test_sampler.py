"""The sampling kernels against `next_tokens`: the same tokens for all options, on a GPU or in Triton's interpreter."""

import random

import pytest
import torch

from clearhead.backends.cuda.sampler import Sampler
from clearhead.backends.cuda.seats import SeatedSequence, Seats
from clearhead.options import SamplingOptions
from clearhead.sampling import SamplingParameters, TokenCounts, next_tokens

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered"),  # SplitMix64 wraps around; NumPy warns of scalars
    pytest.mark.filterwarnings("ignore:invalid value encountered"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered"),
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered"),
]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
V = 1300  # two chunks of 1024
FILTERS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.3},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_p": {"temperature": 0.7, "top_p": 0.9},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "top_k and top_p": {"temperature": 1.0, "top_k": 40, "top_p": 0.6},
    "all": {"temperature": 0.9, "top_k": 100, "top_p": 0.8, "min_p": 0.02},
}
PENALTIES = {
    "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25, "logit_bias": {5: 3.0, 7: -100.0},
    "min_new_tokens": 5, "stop_ids": (3, 4),
}  # fmt: skip


def compare(options, logits, steps, tokens=()):
    """Assert that the kernels choose the tokens of the reference; the seats are in another order than the rows."""
    count = len(options)
    tokens = tokens or [[1]] * count
    seats = Seats(count + 2, 4, logits.shape[1], DEVICE)
    order = random.Random(0).sample(range(count + 2), count)
    seats.assign(
        [
            SeatedSequence(seat=seat, num_tokens=9, pages=[1], options=option, num_generated=step, tokens=text)
            for seat, option, step, text in zip(order, options, steps, tokens, strict=True)
        ]
    )
    sampler = Sampler(seats, count, seats.needs_adjustment(order))
    found = sampler.choose(logits, torch.tensor(order, dtype=torch.int32, device=DEVICE)).tolist()
    parameters = SamplingParameters.from_options(options, logits.shape[1], DEVICE)
    counts = None
    if parameters.needs_counts:
        prompts = [text[: len(text) - step] for text, step in zip(tokens, steps, strict=True)]
        outputs = [text[len(text) - step :] for text, step in zip(tokens, steps, strict=True)]
        counts = TokenCounts.from_tokens(prompts, outputs, logits.shape[1], DEVICE)
    assert found == next_tokens(logits, parameters, torch.tensor(steps, device=DEVICE), counts).tolist()
    assert seats.token[order].tolist() == found
    assert seats.position[order].tolist() == [9] * count
    assert seats.integers[2, order].tolist() == [step + 1 for step in steps]


@pytest.mark.parametrize("scale", [0.5, 4.0])  # flat: filters remove the first draws; steep: they keep them
@pytest.mark.parametrize("name", FILTERS)
def test_the_kernels_choose_the_tokens_of_the_reference(name, scale):
    torch.manual_seed(1)
    logits = torch.randn(6, V, device=DEVICE) * scale
    logits = logits.bfloat16() if name in ("top_p", "all") else logits  # many equal logits
    options = [SamplingOptions(seed=seed - 3, **FILTERS[name]) for seed in range(6)]
    compare(options, logits, list(range(6)))


def test_rows_with_different_options_share_a_batch():
    torch.manual_seed(2)
    options = [SamplingOptions(seed=seed, **each) for seed, each in enumerate(FILTERS.values())]
    compare(options, torch.randn(len(options), V, device=DEVICE) * 2, [0] * len(options))


def test_penalties_biases_and_a_minimum_length_are_those_of_the_reference():
    torch.manual_seed(3)
    rng = random.Random(0)
    options = [
        SamplingOptions(seed=row, max_new_tokens=20, **FILTERS[name], **(PENALTIES if row % 3 else {}))
        for row, name in enumerate(FILTERS)
    ]
    logits = torch.randn(len(options), V, device=DEVICE)
    logits[:, 3] = 9.0  # a stop token, which is not allowed in the first five steps
    tokens = [[rng.choice([1, 3, 5, rng.randrange(V)]) for _ in range(20)] for _ in options]
    compare(options, logits, [row + 1 for row in range(len(options))], tokens)


def test_a_chosen_token_counts_in_the_next_step():
    seats = Seats(2, 4, 10, DEVICE)
    options = SamplingOptions(frequency_penalty=2.0)
    seats.assign([SeatedSequence(seat=1, num_tokens=1, pages=[0], options=options, tokens=[0])])
    logits = torch.tensor([[0, 0, 0, 3.0, 0, 2.0, 0, 0, 0, 0]], device=DEVICE)
    sampler = Sampler(seats, 1, adjust=True)
    active = torch.tensor([1], dtype=torch.int32, device=DEVICE)
    assert [sampler.choose(logits, active).item() for _ in range(4)] == [3, 5, 3, 0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_give_no_token(value, temperature):
    seats = Seats(2, 4, 20, DEVICE)
    sequences = [
        SeatedSequence(seat=seat, num_tokens=1, pages=[0], options=SamplingOptions(temperature=temperature, seed=0))
        for seat in range(2)
    ]
    seats.assign(sequences)
    logits = torch.zeros(2, 20, device=DEVICE)
    logits[1, 7] = value
    tokens = Sampler(seats, 2, adjust=False).choose(logits, torch.tensor([0, 1], dtype=torch.int32, device=DEVICE))
    assert tokens[0] >= 0
    assert tokens[1] == -1
    assert seats.token[1] == 0  # which the next step can embed


def test_rows_without_a_seat_change_nothing():
    seats = Seats(2, 4, 20, DEVICE)
    before = seats.integers.clone()
    active = torch.tensor([-1, -1], dtype=torch.int32, device=DEVICE)
    Sampler(seats, 2, adjust=False).choose(torch.randn(2, 20, device=DEVICE), active)
    assert torch.equal(seats.integers, before)
