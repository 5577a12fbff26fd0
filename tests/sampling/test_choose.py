"""Every filter equals transformers' own, in transformers' order; a sequence never depends on the rest of its batch."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from clearhead.errors import ClearheadError
from clearhead.options import SamplingOptions
from clearhead.sampling import choose
from clearhead.sampling.choose import adjust_logits, filter_logits, next_tokens, token_logprobs
from clearhead.sampling.parameters import SamplingParameters
from clearhead.sampling.penalties import TokenCounts

V = 97
B = 6


def many_logits(generator: torch.Generator) -> torch.Tensor:
    """Return plain, tied, flat, peaked, spread and partly impossible logits (B, V)."""
    logits = torch.randn(B, V, generator=generator) * 3
    logits[1] = logits[1].round()
    logits[2] = 0.0
    logits[3, 5] = 60.0
    logits[4] *= 20
    logits[5, ::2] = -math.inf
    return logits


def filtered(logits: torch.Tensor, **options: object) -> torch.Tensor:
    options = {"temperature": 1.0, "seed": 0} | options
    return filter_logits(
        logits, SamplingParameters.from_options([SamplingOptions(**options)] * len(logits), logits.shape[1])
    )


# --- one filter at a time


@pytest.mark.parametrize("top_k", [1, 2, 5, V - 1, V, V + 1, 10 * V])
def test_top_k_equals_transformers(top_k, generator):
    logits = many_logits(generator)
    assert torch.equal(filtered(logits, top_k=top_k), TopKLogitsWarper(top_k)(None, logits))


@pytest.mark.parametrize("top_p", [1e-30, 1e-9, 0.01, 0.1, 0.25, 1 / 3, 0.5, 0.75, 0.9, 0.999, 1 - 1e-7])
def test_top_p_equals_transformers(top_p, generator):
    logits = many_logits(generator)
    ours, theirs = filtered(logits, top_p=top_p), TopPLogitsWarper(top_p)(None, logits)
    distinct = [0, 3, 4, 5]
    assert torch.equal(ours[distinct], theirs[distinct])
    # Which of several equal tokens stay is undefined by transformers' sort; how many of each value stay is defined.
    assert torch.equal(ours.sort().values, theirs.sort().values)
    assert (ours > -math.inf).any(dim=1).all()


@pytest.mark.parametrize("vocab_size", [1, 2, 10, 16, 1000])
@pytest.mark.parametrize("top_p", [1e-9, 0.1, 0.2, 0.5, 0.7, 0.9])
def test_top_p_of_equal_logits_keeps_the_lowest_ids_and_as_many_as_transformers(vocab_size, top_p):
    logits = torch.full((2, vocab_size), 1.5)
    num_kept = (TopPLogitsWarper(top_p)(None, logits) > -math.inf).sum(dim=1, keepdim=True)
    kept = filtered(logits, top_p=top_p) > -math.inf
    assert num_kept.min() >= 1
    assert torch.equal(kept, torch.arange(vocab_size) < num_kept)


def test_top_p_1_keeps_every_token(generator):
    logits = many_logits(generator)
    assert torch.equal(filtered(logits, top_p=1.0), logits)
    ordinary = logits[:3]
    assert torch.equal(filtered(ordinary, top_p=1.0), TopPLogitsWarper(1.0)(None, ordinary))


@pytest.mark.parametrize("min_p", [0.0, 1e-6, 0.05, 0.3, 0.9, 1.0])
def test_min_p_equals_transformers(min_p, generator):
    logits = many_logits(generator)
    assert torch.equal(filtered(logits, min_p=min_p), MinPLogitsWarper(min_p)(None, logits))


@pytest.mark.parametrize("temperature", [1e-6, 0.3, 0.7, 1.0, 1.7, 100.0])
def test_temperature_equals_transformers(temperature, generator):
    logits = many_logits(generator)
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    assert torch.equal(filtered(logits, temperature=temperature), expected)


def test_bias_equals_transformers(generator):
    logits = many_logits(generator)
    bias = {0: -100.0, 5: 2.5, V - 1: 100.0}
    rows = SamplingParameters.from_options([SamplingOptions(logit_bias=bias)] * B, V)
    expected = SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})(None, logits)
    assert torch.equal(adjust_logits(logits, rows, torch.zeros(B, dtype=torch.int64)), expected)


@pytest.mark.parametrize("step", [0, 2, 3, 4])
def test_min_new_tokens_equals_transformers(step, generator):
    logits = many_logits(generator)
    rows = SamplingParameters.from_options([SamplingOptions(min_new_tokens=3, stop_ids=[4, 50])] * B, V)
    written = torch.zeros(B, 7 + step, dtype=torch.int64)
    expected = MinNewTokensLengthLogitsProcessor(7, 3, [4, 50])(written, logits)
    assert torch.equal(adjust_logits(logits, rows, torch.full((B,), step)), expected)


# --- all filters in order

FULL = {
    "logit_bias": {3: 4.0, 8: -2.0, 11: 100.0},
    "repetition_penalty": 1.4,
    "min_new_tokens": 4,
    "stop_ids": [2, 9],
    "temperature": 0.7,
    "top_k": 30,
    "top_p": 0.9,
    "min_p": 0.02,
    "seed": 3,
}


def transformers_processors() -> LogitsProcessorList:
    """Return what transformers' `generate` applies for the same options, in its own order."""
    network = GPT2LMHeadModel(GPT2Config(vocab_size=V, n_positions=32, n_embd=4, n_layer=1, n_head=1))
    config = GenerationConfig(
        do_sample=True,
        sequence_bias=[[[token], value] for token, value in FULL["logit_bias"].items()],
        eos_token_id=FULL["stop_ids"],
        **{name: FULL[name] for name in ("repetition_penalty", "min_new_tokens", "temperature")},
        **{name: FULL[name] for name in ("top_k", "top_p", "min_p")},
    )
    config._eos_token_tensor = torch.tensor(FULL["stop_ids"])
    return network._get_logits_processor(config, input_ids_seq_length=5, device="cpu")


def test_all_filters_together_equal_transformers(generator):
    chain = transformers_processors()
    assert [type(step) for step in chain] == [
        SequenceBiasLogitsProcessor,
        RepetitionPenaltyLogitsProcessor,
        MinNewTokensLengthLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
        MinPLogitsWarper,
    ]
    rows = SamplingParameters.from_options([SamplingOptions(**FULL)] * B, V)
    for step in (0, 3, 4, 6):
        logits = many_logits(generator)
        written = torch.randint(V, (B, 5 + step), generator=generator)
        written[:, 0] = 11
        counts = TokenCounts.from_tokens(written[:, :5].tolist(), written[:, 5:].tolist(), V)
        ours = filter_logits(adjust_logits(logits, rows, torch.full((B,), step), counts), rows)
        expected = chain(written, logits)
        assert torch.equal(ours[[0, 3, 4, 5]], expected[[0, 3, 4, 5]])
        assert torch.equal(ours.sort().values, expected.sort().values)


def test_presence_and_frequency_penalties_follow_the_bias_and_the_repetition_penalty():
    options = SamplingOptions(logit_bias={1: 3.0}, repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5)
    counts = TokenCounts.from_tokens([[0]], [[1, 1]], 3)
    logits = adjust_logits(
        torch.tensor([[4.0, 1.0, 1.0]]), SamplingParameters.from_options([options], 3), torch.tensor([2]), counts
    )
    assert logits.tolist() == [[4.0 / 2, (1.0 + 3.0) / 2 - 2 * 0.25 - 0.5, 1.0]]


# --- tokens


def test_greedy_takes_the_first_of_the_most_likely_tokens_whatever_the_filters():
    logits = torch.tensor([[1.0, 5.0, 5.0, 0.0]])
    for filters in ({}, {"top_k": 1}, {"top_p": 0.1}, {"min_p": 1.0}):
        rows = SamplingParameters.from_options([SamplingOptions(**filters)], 4)
        assert next_tokens(logits, rows, torch.tensor([0])).tolist() == [1]


def test_greedy_decoding_applies_bias_penalties_and_min_new_tokens():
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    steps, counts = torch.tensor([1]), TokenCounts.from_tokens([[]], [[0]], 3)
    for options, token in [
        (SamplingOptions(), 0),
        (SamplingOptions(logit_bias={2: 5.0}), 2),
        (SamplingOptions(presence_penalty=1.5), 1),
        (SamplingOptions(frequency_penalty=1.5), 1),
        (SamplingOptions(repetition_penalty=2.0), 1),
        (SamplingOptions(min_new_tokens=2, stop_ids=[0]), 1),
        (SamplingOptions(min_new_tokens=1, stop_ids=[0]), 0),
    ]:
        assert next_tokens(logits, SamplingParameters.from_options([options], 3), steps, counts).tolist() == [token]


VARIED = [
    SamplingOptions(),
    SamplingOptions(temperature=1.0, seed=1),
    SamplingOptions(temperature=0.5, top_k=3, seed=2),
    SamplingOptions(temperature=2.0, top_p=0.8, seed=2),
    SamplingOptions(temperature=1.3, min_p=0.1, seed=4, repetition_penalty=1.5),
    SamplingOptions(presence_penalty=0.7, frequency_penalty=-0.3, logit_bias={1: 2.0}),
    SamplingOptions(temperature=0.9, top_k=50, top_p=0.5, min_new_tokens=10, stop_ids=[0, 3], seed=2),
    SamplingOptions(temperature=1.0, seed=1),
]


@pytest.mark.parametrize("vocab_size", [13, 1000, 50_257])
def test_a_sequence_gives_the_same_bits_alone_and_in_any_batch(vocab_size, generator):
    rows = len(VARIED)
    logits = torch.randn(rows, vocab_size, generator=generator) * 3
    steps = torch.tensor([0, 1, 2, 3, 4, 5, 6, 1])
    prompts = torch.randint(vocab_size, (rows, 5), generator=generator).tolist()
    outputs = torch.randint(vocab_size, (rows, 4), generator=generator).tolist()

    def run(chosen: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        options = SamplingParameters.from_options([VARIED[row] for row in chosen], vocab_size)
        counts = TokenCounts.from_tokens([prompts[row] for row in chosen], [outputs[row] for row in chosen], vocab_size)
        processed = filter_logits(adjust_logits(logits[chosen], options, steps[chosen], counts), options)
        return processed, next_tokens(logits[chosen], options, steps[chosen], counts)

    processed, tokens = run(list(range(rows)))
    for chosen in [[row] for row in range(rows)] + [[7, 2, 0], [3, 3, 6, 5], [4, 1]]:
        some_processed, some_tokens = run(chosen)
        assert torch.equal(some_processed, processed[chosen])
        assert torch.equal(some_tokens, tokens[chosen])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_cuda_gives_the_tokens_of_the_cpu_in_any_batch_and_without_synchronization(generator):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    logits = torch.randn(len(VARIED), 50_257, generator=generator) * 3
    steps = torch.arange(len(VARIED))
    tokens = torch.randint(50_257, (len(VARIED), 9), generator=generator).tolist()

    def run(chosen: list[int], device: str) -> torch.Tensor:
        rows = SamplingParameters.from_options([VARIED[row] for row in chosen], 50_257, device)
        written = [tokens[row] for row in chosen]
        counts = TokenCounts.from_tokens([row[:5] for row in written], [row[5:] for row in written], 50_257, device)
        arguments = logits[chosen].to(device), rows, steps[chosen].to(device), counts
        try:
            torch.cuda.set_sync_debug_mode("error")
            result = next_tokens(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return result.cpu()

    expected = run(list(range(len(VARIED))), "cpu")
    for chosen in [list(range(len(VARIED))), *([row] for row in range(len(VARIED))), [7, 2, 0], [3, 3, 6, 5]]:
        assert torch.equal(run(chosen, "cuda"), expected[chosen])


def test_a_seed_repeats_its_tokens_and_other_seeds_give_others():
    logits = torch.zeros(1, 1000)

    def sequence(seed: int) -> list[int]:
        rows = SamplingParameters.from_options([SamplingOptions(temperature=1.0, seed=seed)], 1000)
        return [int(next_tokens(logits, rows, torch.tensor([step]))) for step in range(20)]

    assert sequence(5) == sequence(5)
    assert len({tuple(sequence(seed)) for seed in range(20)}) == 20
    assert len(set(sequence(5))) > 15


def test_sampled_tokens_are_distributed_as_the_filtered_logits(generator):
    """The frequencies in 20,000 sequences equal the probabilities of transformers' filtered logits."""
    logits = torch.randn(1, 40, generator=generator) * 2
    base = SamplingOptions(temperature=0.8, top_k=20, top_p=0.95, min_p=0.01)
    rows = SamplingParameters.from_options([replace(base, seed=seed) for seed in range(20_000)], 40)
    tokens = next_tokens(logits.expand(20_000, 40), rows, torch.zeros(20_000, dtype=torch.int64))
    chain = [TemperatureLogitsWarper(0.8), TopKLogitsWarper(20), TopPLogitsWarper(0.95), MinPLogitsWarper(0.01)]
    probabilities = LogitsProcessorList(chain)(None, logits).softmax(-1)[0].double()
    counts = tokens.bincount(minlength=40)
    assert counts[probabilities == 0].sum() == 0
    deviations = (counts - 20_000 * probabilities) / (20_000 * probabilities * (1 - probabilities)).sqrt()
    assert deviations[probabilities > 0].abs().max() < 4


def test_half_precision_logits_are_filtered_in_float32(generator):
    logits = torch.randn(64, 1000, generator=generator).bfloat16()
    for filters in ({"top_p": 0.5}, {"min_p": 0.2}, {"logit_bias": {1: 0.001}}, {}):
        rows = SamplingParameters.from_options(
            [SamplingOptions(temperature=1.0, seed=seed, **filters) for seed in range(64)], 1000
        )
        steps = torch.zeros(64, dtype=torch.int64)
        assert torch.equal(next_tokens(logits, rows, steps), next_tokens(logits.float(), rows, steps))


def test_ids_outside_the_vocabulary_raise():
    with pytest.raises(ClearheadError, match="logit_bias contains token 97; the vocabulary has the ids 0 to 96"):
        SamplingOptions(logit_bias={V: 1.0}).check_vocabulary(V)
    with pytest.raises(ClearheadError, match="stop_ids contains token 100"):
        SamplingOptions(stop_ids=[1, 100]).check_vocabulary(V)
    SamplingOptions(logit_bias={V - 1: 1.0}, stop_ids=[0, V - 1]).check_vocabulary(V)


# --- log-probabilities


def test_logprobs_equal_those_of_the_unfiltered_distribution(generator):
    logits = torch.randn(3, 5, V, generator=generator) * 4
    tokens = torch.randint(V, (3, 5), generator=generator)
    result = token_logprobs(logits, tokens, num_top=4)
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none")
    torch.testing.assert_close(result.chosen.flatten(), -losses)
    exact = torch.distributions.Categorical(logits=logits.double())
    torch.testing.assert_close(result.top, exact.log_prob(result.top_ids.movedim(-1, 0)).movedim(0, -1).float())
    assert torch.equal(result.top_ids[..., 0], logits.argmax(-1))
    assert torch.equal(result.top, result.top.sort(-1, descending=True).values)


def test_logprobs_with_no_alternatives_and_with_more_than_the_vocabulary(generator):
    logits, tokens = torch.randn(2, 3, generator=generator), torch.tensor([0, 2])
    assert token_logprobs(logits, tokens).top.shape == (2, 0)
    all_of_them = token_logprobs(logits, tokens, num_top=20)
    assert all_of_them.top_ids.sort(-1).values.tolist() == [[0, 1, 2], [0, 1, 2]]
    torch.testing.assert_close(all_of_them.top.exp().sum(-1), torch.ones(2))


def test_a_sequence_has_the_same_logprobs_alone_and_in_a_batch(generator):
    logits, tokens = torch.randn(5, 50_257, generator=generator), torch.arange(5)
    together = token_logprobs(logits, tokens, num_top=3)
    for row in range(5):
        alone = token_logprobs(logits[row, None], tokens[row, None], num_top=3)
        assert torch.equal(alone.chosen[0], together.chosen[row])
        assert torch.equal(alone.top[0], together.top[row])
        assert torch.equal(alone.top_ids[0], together.top_ids[row])


# --- the searches that are faster on a CPU


def cut_tail_by_sorting(logits, tail):
    """Cut the tail of every row by sorting the whole vocabulary."""
    descending, order = logits.sort(dim=-1, descending=True, stable=True)
    cumulative = descending.flip(-1).softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64).float()
    cut = (cumulative <= tail).flip(-1)
    cut[:, 0] = False
    return logits.masked_fill(cut.scatter(1, order, cut), -torch.inf)


@pytest.mark.parametrize("vocab_size", [1, 2, 7, 300, 50_257])
@pytest.mark.parametrize("scale", [0.1, 2.0, 8.0])
@pytest.mark.parametrize("rounded", [False, True])
def test_cutting_the_tail_equals_sorting_the_vocabulary(vocab_size, scale, rounded):
    logits = torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(1)) * scale
    logits = logits.round() if rounded else logits  # many equal ones
    logits[4, vocab_size // 3 + 1 :] = -torch.inf
    for tail in (0.0001, 0.05, 0.5, 0.999):
        tails = torch.tensor([[tail]] * 5 + [[-1.0]])  # the last row does not use top_p
        assert torch.equal(choose._cut_tail(logits, tails), cut_tail_by_sorting(logits, tails))


def test_cutting_the_tail_keeps_logits_that_are_not_finite():
    logits = torch.tensor([[1.0, torch.nan, 2.0], [1.0, torch.inf, 2.0]])
    assert choose._cut_tail(logits, torch.full((2, 1), 0.1)).isfinite().sum() == 4


def test_the_most_likely_token_is_the_first_of_the_largest_or_of_nan():
    nan, inf = torch.nan, torch.inf
    logits = torch.tensor(
        [[1, nan, 5, nan], [2, 7, 7, 1], [inf, 1, inf, 0], [-inf] * 4, [nan] * 4, [-0.0, 0.0, -1, 0], [1, 2, 3, 4]]
    )
    assert choose._argmax(logits).tolist() == logits.argmax(dim=-1).tolist() == [1, 1, 0, 0, 0, 0, 3]
