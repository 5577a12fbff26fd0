"""Speculative decoding equals plain decoding: greedily token for token, sampling in its exact distribution."""

from collections import Counter
from unittest.mock import Mock

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from clearhead.architecture import Chunked, Head, LearnedPositions, ModelConfig, Rope, SlidingWindow
from clearhead.errors import ClearheadError
from clearhead.generation.decoding import decode
from clearhead.generation.plain import decode_plainly
from clearhead.generation.sequences import TokenSequence
from clearhead.generation.speculative import (
    Draft,
    DraftModel,
    PromptLookup,
    SpeculationStats,
    accept_draft,
    decode_speculatively,
)
from clearhead.options import SamplingOptions
from tests.checkpoint.tiny import tiny_network
from tests.model.toys import CONTEXT, WIDTH, decoder, latent, stack, toy, translator
from tests.parity import test_deepseek, test_llama, test_llama4
from tests.parity.harness import build_reference, load_network
from tests.sampling.test_randomness import chi_square, chi_square_bound


class RandomDrafter:
    """Draft random tokens, nearly always wrong, of any length including 0."""

    num_tokens = 5

    def __init__(self, vocab_size):
        self.vocab_size = vocab_size
        self.generator = torch.Generator().manual_seed(0)

    def draft(self, sequence, count):
        count = int(torch.randint(count + 1, (1,), generator=self.generator))
        return Draft(torch.randint(self.vocab_size, (count,), generator=self.generator).tolist())


class EmptyDrafter:
    """Draft nothing."""

    num_tokens = 1

    def draft(self, sequence, count):
        return Draft([])


class ScriptedDrafter:
    """Draft `num_right` tokens of a known text, then wrong ones."""

    num_tokens = 6

    def __init__(self, text, num_right):
        self.text, self.num_right = text, num_right

    def draft(self, sequence, count):
        known = self.text[len(sequence.tokens) : len(sequence.tokens) + count]
        return Draft([*known[: self.num_right], *(token ^ 1 for token in known[self.num_right :])])


def speculate(network, drafter, prompt, stats=None, encoder_output=None, **options):
    sequence = TokenSequence(prompt, SamplingOptions(**options))
    steps = decode_speculatively(network, sequence, drafter, encoder_output=encoder_output, stats=stats)
    assert sum(1 for _ in steps) == len(sequence.tokens)
    return sequence.tokens


def plain(network, prompt, encoder_output=None, **options):
    return list(decode_plainly(network, prompt, SamplingOptions(**options), encoder_output))


# --- greedy

REAL_CASES = {
    str(case): case
    for case in (*test_llama.CASES, *test_deepseek.CASES, *test_llama4.CASES)
    if str(case) in ("llama", "mistral", "v3", "v2-lite-greedy", "scout")
}


@pytest.mark.parametrize("name", REAL_CASES)
def test_greedy_decoding_of_real_families_equals_plain_decoding(name, tmp_path):
    """Full, sliding, latent and chunked attention, with windows and chunks far shorter than the text."""
    network = load_network(build_reference(REAL_CASES[name]), tmp_path)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 1, 4]
    expected = plain(network, prompt, max_new_tokens=40)
    drafters = [PromptLookup(), PromptLookup(3, 1), RandomDrafter(97), DraftModel(network, 3)]
    for drafter in (*drafters, ScriptedDrafter(expected, 2)):
        assert speculate(network, drafter, prompt, max_new_tokens=40) == expected


CONFIGS = {
    "full": decoder(Rope()),
    "window": decoder(Rope(), pattern=SlidingWindow(size=3)),
    "chunk": decoder(Rope(), pattern=Chunked(size=5)),
    "latent": ModelConfig(width=WIDTH, context=CONTEXT, decoder=stack(latent()), head=Head()),
}


@pytest.mark.parametrize("drafting", CONFIGS)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_draft_model_may_have_another_kind_of_attention(name, drafting):
    network, other = toy(CONFIGS[name]), toy(CONFIGS[drafting])
    drafter = DraftModel(other, 4)
    for prompt in [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 9], [9]:  # one drafter for several texts
        expected = plain(network, prompt, max_new_tokens=20)
        assert speculate(network, drafter, prompt, max_new_tokens=20) == expected


@pytest.mark.parametrize("seed", range(3))
def test_options_that_change_the_most_likely_token(seed):
    network = tiny_network(seed)
    for options in (
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.8, "frequency_penalty": 0.3},
        {"logit_bias": {5: 1.0, 7: -1.0}},
        {"stop_ids": range(0, 31, 4)},
        {"stop_ids": range(0, 31, 2), "min_new_tokens": 7},
        {"max_new_tokens": 1},
        {"max_new_tokens": 0},
    ):
        expected = plain(network, [8, 3, 8], **({"max_new_tokens": 24} | options))
        for drafter in (
            PromptLookup(4),
            DraftModel(tiny_network(seed + 1), 3),
            DraftModel(network, 3),
            RandomDrafter(31),
        ):
            assert speculate(network, drafter, [8, 3, 8], **({"max_new_tokens": 24} | options)) == expected


def test_speculative_decoding_of_an_encoder_decoder():
    network = toy(translator())
    options = {"max_new_tokens": 20, "frequency_penalty": 0.7}  # otherwise the toy repeats one token
    texts = []
    for source in [3, 4, 5, 6], [7], [20, 9]:
        with torch.inference_mode():
            encoder_output = network.encode(torch.tensor([source]))
        texts.append(plain(network, [1], encoder_output, **options))
        for drafter in PromptLookup(), ScriptedDrafter(texts[-1], 2):
            assert speculate(network, drafter, [1], encoder_output=encoder_output, **options) == texts[-1]
        stats = SpeculationStats()
        assert (
            speculate(network, DraftModel(network, 3, encoder_output), [1], stats, encoder_output, **options)
            == texts[-1]
        )
        assert stats.num_accepted == stats.num_drafted > 0
    assert len(set(map(tuple, texts))) == 3


def test_learned_positions_limit_the_network_and_the_draft_model():
    long, short = (toy(decoder(LearnedPositions(num_positions=number))) for number in (CONTEXT, 12))
    sequence = TokenSequence([1, 2, 3], SamplingOptions(max_new_tokens=99))
    list(decode(long, [sequence]))
    expected = sequence.tokens
    assert len(expected) == CONTEXT - 2
    for drafter in PromptLookup(), DraftModel(short, 4), DraftModel(long, 4):
        assert speculate(long, drafter, [1, 2, 3], max_new_tokens=99) == expected


# --- number of network calls


def test_repetitive_text_takes_fewer_calls_than_tokens():
    network = tiny_network()
    stats = SpeculationStats()
    text = speculate(network, PromptLookup(num_tokens=8), [5, 6, 7], stats, max_new_tokens=60)
    assert len(text) == 60
    assert stats.num_calls <= 20
    assert stats.num_calls + stats.num_accepted == 60
    assert stats.num_accepted <= stats.num_drafted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_equal_to_the_network_is_always_accepted(temperature):
    network, stats = tiny_network().double(), SpeculationStats()
    speculate(network, DraftModel(network, 4), [5, 6], stats, max_new_tokens=31, temperature=temperature, seed=1)
    assert stats == SpeculationStats(num_calls=1 + 30 // 5, num_drafted=24, num_accepted=24)


def test_the_network_reads_each_accepted_and_each_rejected_token_once():
    network, stats = tiny_network(), SpeculationStats()
    lengths = []
    network.decoder.register_forward_pre_hook(lambda module, inputs: lengths.append(inputs[0].shape[1]))
    text = plain(network, [5, 6], max_new_tokens=20)
    lengths.clear()
    speculate(network, ScriptedDrafter(text, 2), [5, 6], stats, max_new_tokens=20)
    assert len(lengths) == stats.num_calls == 1 + -(-19 // 3)
    assert sum(lengths) == 2 + stats.num_drafted + stats.num_calls - 1


# --- sampling


def test_without_drafts_the_tokens_equal_plain_sampling():
    network = tiny_network()
    for seed in range(10):
        options = {"temperature": 1.2, "top_k": 12, "top_p": 0.9, "min_p": 0.01, "seed": seed, "max_new_tokens": 12}
        assert speculate(network, EmptyDrafter(), [5, 6], **options) == plain(network, [5, 6], **options)


STOP, LIMIT, NUM_DRAWS = 3, 4, 1000


def exact_probabilities(network, prompt, processors, text=()):
    """Return the probability of every text, computed without a cache and with transformers' filters."""
    with torch.inference_mode():
        logits = network(torch.tensor([[*prompt, *text]]))[:, -1]
    chances = processors(None, logits).softmax(dim=-1)[0].tolist()
    probabilities = {}
    for token, chance in enumerate(chances):
        longer = (*text, token)
        if token == STOP or len(longer) == LIMIT:
            probabilities[longer] = chance
        else:
            rest = exact_probabilities(network, prompt, processors, longer)
            probabilities |= {whole: chance * part for whole, part in rest.items()}
    return probabilities


FILTERS = {
    "temperature": ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
    "top-k and top-p": (
        {"temperature": 1.5, "top_k": 3, "top_p": 0.85},
        [TemperatureLogitsWarper(1.5), TopKLogitsWarper(3), TopPLogitsWarper(0.85)],
    ),
}


@pytest.mark.parametrize("drafting", ["lookup", "model"])
@pytest.mark.parametrize("filters", FILTERS)
def test_sampled_texts_have_the_exact_distribution(drafting, filters):
    network, other = (tiny_network(seed, vocab_size=4, num_layers=1) for seed in (4, 9))
    options, warpers = FILTERS[filters]
    prompt = [0, 1, 2, 1, 0, 2, 2, 0, 1]
    probabilities = exact_probabilities(network, prompt, LogitsProcessorList(warpers))
    assert sum(probabilities.values()) == pytest.approx(1, abs=1e-5)
    stats, frequencies = SpeculationStats(), Counter()
    for seed in range(NUM_DRAWS):
        drafter = PromptLookup(3, 1) if drafting == "lookup" else DraftModel(other, 3)
        tokens = speculate(network, drafter, prompt, stats, max_new_tokens=LIMIT, stop_ids=[STOP], seed=seed, **options)
        frequencies[tuple(tokens)] += 1
    assert 0.2 < stats.num_accepted / stats.num_drafted < 0.9
    assert all(probabilities[text] > 0 for text in frequencies)
    likely = [text for text in probabilities if probabilities[text] * NUM_DRAWS >= 5]
    rare = [text for text in probabilities if 0 < probabilities[text] * NUM_DRAWS < 5]
    counts = [frequencies[text] for text in likely] + [sum(frequencies[text] for text in rare)] * bool(rare)
    chances = [probabilities[text] for text in likely] + [sum(probabilities[text] for text in rare)] * bool(rare)
    statistic = chi_square(torch.tensor(counts), torch.tensor(chances))
    assert len(counts) > 15
    assert statistic < chi_square_bound(len(counts) - 1)


class FixedDraftModel(DraftModel):
    """Draft from q, whatever the text."""

    q = torch.tensor([0.6, 0.3, 0.05, 0.05])

    def next_logits(self, text):
        return self.q.log()[None]


def test_draft_acceptance_and_token_use_independent_random_numbers():
    """One step with p far from q: noise shared by two of the three would shift p by several hundredths."""
    p = torch.tensor([0.05, 0.45, 0.1, 0.4])
    network, counts = tiny_network(vocab_size=4), torch.zeros(4)
    for seed in range(3000):
        sequence = TokenSequence([1], SamplingOptions(temperature=1.0, seed=seed))
        draft = FixedDraftModel(network, 1).draft(sequence, 1)
        counts[accept_draft(network, sequence, draft, p.log().expand(2, 4))[0]] += 1
    assert chi_square(counts, p) < chi_square_bound(3)


# --- behavior shared with decode


def test_log_probabilities_equal_those_of_decode():
    network = tiny_network()
    sequences = [TokenSequence([5, 6, 7], SamplingOptions(max_new_tokens=30, logprobs=3)) for _ in range(2)]
    assert list(decode(network, sequences[:1])) == list(decode_speculatively(network, sequences[1], PromptLookup()))
    assert sequences[0].tokens == sequences[1].tokens
    assert len(sequences[1].logprobs) == 30
    for one, other in zip(sequences[0].logprobs, sequences[1].logprobs, strict=True):
        assert torch.equal(one.top_ids, other.top_ids)
        torch.testing.assert_close(one.chosen, other.chosen)
        torch.testing.assert_close(one.top, other.top)


def test_a_caller_may_finish_the_sequence_at_any_token():
    network = tiny_network()
    sequence = TokenSequence([5, 6, 7], SamplingOptions(max_new_tokens=60))
    for _ in decode_speculatively(network, sequence, PromptLookup()):
        sequence.finished = len(sequence.tokens) == 33
    assert sequence.tokens == plain(network, [5, 6, 7], max_new_tokens=33)


def test_an_interrupted_draft_model_can_be_used_again(monkeypatch):
    network, drafter = tiny_network(), DraftModel(tiny_network(seed=1))
    drafter.draft(TokenSequence([5, 6, 7], SamplingOptions()), 3)
    with monkeypatch.context() as patch:
        patch.setattr(drafter.cache, "advance", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            drafter.draft(TokenSequence([5, 6, 7, 8, 9], SamplingOptions()), 3)
    options = {"max_new_tokens": 12}
    assert speculate(network, drafter, [5, 6, 7, 8, 9], **options) == plain(network, [5, 6, 7, 8, 9], **options)


def test_a_long_prompt_is_read_in_chunks(monkeypatch):
    monkeypatch.setattr("clearhead.generation.decoding.PREFILL_CHUNK", 10)
    network, prompt = toy(CONFIGS["window"]), list(range(1, 24))
    lengths = []
    network.decoder.register_forward_pre_hook(lambda module, inputs: lengths.append(inputs[0].shape[1]))
    sequence = TokenSequence(prompt, SamplingOptions(max_new_tokens=6))
    list(decode_speculatively(network, sequence, PromptLookup()))
    assert lengths[:3] == [10, 10, 3]
    assert sequence.tokens == plain(network, prompt, max_new_tokens=6)


# --- prompt lookup


def draft(text, drafter, count=6):
    cut = len(text) // 2
    sequence = TokenSequence(text[:cut], SamplingOptions(), tokens=text[cut:])
    return drafter.draft(sequence, count).tokens


def test_lookup_copies_the_tokens_that_followed():
    assert draft([1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 3], PromptLookup()) == [4, 5, 6, 7, 8, 9]
    assert draft([1, 2, 3, 4, 5, 6], PromptLookup()) == []
    assert draft([7], PromptLookup()) == []


def test_lookup_prefers_the_longest_match_and_then_the_latest():
    assert draft([2, 3, 4, 8, 3, 4, 9, 2, 3, 4], PromptLookup(ngram=3), 1) == [8]
    assert draft([2, 3, 4, 8, 3, 4, 9, 2, 3, 4], PromptLookup(ngram=2), 1) == [9]


def test_the_copy_of_a_lookup_may_overlap_itself():
    assert draft([4, 7, 7], PromptLookup()) == [7] * 6
    assert draft([9, 1, 2, 3, 1, 2, 3], PromptLookup(), 8) == [1, 2, 3, 1, 2, 3, 1, 2]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_draft_of_a_lookup_occurs_in_the_text(size, generator):
    for _ in range(50):
        text = torch.randint(4, (30,), generator=generator).tolist()
        tokens = draft(text, PromptLookup(ngram=size), 3)
        extended = text + tokens
        starts = range(len(text) - 1)
        assert any(text[-1:] + tokens == extended[n : n + 1 + len(tokens)] for n in starts) == bool(tokens)


# --- invalid arguments


def test_invalid_drafters_raise():
    for make in (lambda: PromptLookup(0), lambda: PromptLookup(ngram=0), lambda: DraftModel(tiny_network(), 1.5)):
        with pytest.raises(ClearheadError, match="it must be a whole number, 1 or more"):
            make()
    with pytest.raises(
        ClearheadError, match="a vocabulary of 30 tokens, but this model has one of 31; use a draft model"
    ):
        speculate(tiny_network(), DraftModel(tiny_network(vocab_size=30)), [1])
    with pytest.raises(ClearheadError, match="text is empty"):
        speculate(tiny_network(), PromptLookup(), [])
