"""Speculative text is the text of plain decoding: greedy token for token, sampled by its exact law."""

from collections import Counter
from unittest.mock import Mock

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from clearhead.architecture.config import Head, ModelConfig
from clearhead.architecture.parts import Chunked, LearnedPositions, Rope, SlidingWindow
from clearhead.errors import ClearheadError
from clearhead.generation.decode import TokenSequence, decode
from clearhead.generation.plain import decode_plainly
from clearhead.generation.speculative import Draft, DraftModel, PromptLookup, Tally, decode_speculatively, verify
from clearhead.options import SamplingOptions
from tests.checkpoint.tiny import tiny_network
from tests.generation.test_randomness import chi_square, chi_square_bound
from tests.model.toys import CONTEXT, WIDTH, decoder, latent, stack, toy, translator
from tests.parity import test_deepseek, test_llama, test_llama4
from tests.parity.harness import build, load_ours


class RandomGuesses:
    """Wrong nearly always; of any length, none included."""

    num_tokens = 5

    def __init__(self, vocab_size):
        self.vocab_size = vocab_size
        self.generator = torch.Generator().manual_seed(0)

    def draft(self, row, count):
        count = int(torch.randint(count + 1, (1,), generator=self.generator))
        return Draft(torch.randint(self.vocab_size, (count,), generator=self.generator).tolist())


class NoGuess:
    num_tokens = 1

    def draft(self, row, count):
        return Draft([])


class Prophet:
    """Knows the first tokens of the text, then errs."""

    num_tokens = 6

    def __init__(self, text, num_right):
        self.text, self.num_right = text, num_right

    def draft(self, row, count):
        known = self.text[len(row.tokens) : len(row.tokens) + count]
        return Draft([*known[: self.num_right], *(token ^ 1 for token in known[self.num_right :])])


def speculate(network, drafter, prompt, tally=None, encoder_output=None, **options):
    row = TokenSequence(prompt, SamplingOptions(**options))
    num_turns = sum(1 for _ in decode_speculatively(network, row, drafter, encoder_output=encoder_output, tally=tally))
    assert num_turns == len(row.tokens)
    return row.tokens


def plain(network, prompt, encoder_output=None, **options):
    return list(decode_plainly(network, prompt, SamplingOptions(**options), encoder_output))


# --- greedy

REAL_CASES = {
    str(case): case
    for case in (*test_llama.CASES, *test_deepseek.CASES, *test_llama4.CASES)
    if str(case) in ("llama", "mistral", "v3", "v2-lite-greedy", "scout")
}


@pytest.mark.parametrize("name", REAL_CASES)
def test_greedy_text_of_families_is_that_of_plain_decoding(name, tmp_path):
    """Full, sliding, latent and chunked attention; windows and chunks are far shorter than the text."""
    network = load_ours(build(REAL_CASES[name]), tmp_path)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 1, 4]
    expected = plain(network, prompt, max_new_tokens=40)
    drafters = [PromptLookup(), PromptLookup(3, 1), RandomGuesses(97), DraftModel(network, 3)]
    for drafter in (*drafters, Prophet(expected, 2)):
        assert speculate(network, drafter, prompt, max_new_tokens=40) == expected


CONFIGS = {
    "full": decoder(Rope()),
    "window": decoder(Rope(), pattern=SlidingWindow(size=3)),
    "chunk": decoder(Rope(), pattern=Chunked(size=5)),
    "latent": ModelConfig(width=WIDTH, context=CONTEXT, decoder=stack(latent()), head=Head()),
}


@pytest.mark.parametrize("drafting", CONFIGS)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_draft_model_of_another_kind(name, drafting):
    network, other = toy(CONFIGS[name]), toy(CONFIGS[drafting])
    drafter = DraftModel(other, 4)
    for prompt in [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 9], [9]:  # the drafter stays, the text changes
        expected = plain(network, prompt, max_new_tokens=20)
        assert speculate(network, drafter, prompt, max_new_tokens=20) == expected


@pytest.mark.parametrize("seed", range(3))
def test_every_option_that_changes_the_likeliest_token(seed):
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
            RandomGuesses(31),
        ):
            assert speculate(network, drafter, [8, 3, 8], **({"max_new_tokens": 24} | options)) == expected


def test_sources_and_their_encoder():
    network = toy(translator())
    options = {"max_new_tokens": 20, "frequency_penalty": 0.7}  # else a toy says one word only
    texts = []
    for source in [3, 4, 5, 6], [7], [20, 9]:
        with torch.inference_mode():
            encoder_output = network.encode(torch.tensor([source]))
        texts.append(plain(network, [1], encoder_output, **options))
        for drafter in PromptLookup(), Prophet(texts[-1], 2):
            assert speculate(network, drafter, [1], encoder_output=encoder_output, **options) == texts[-1]
        tally = Tally()
        assert (
            speculate(network, DraftModel(network, 3, encoder_output), [1], tally, encoder_output, **options)
            == texts[-1]
        )
        assert tally.num_accepted == tally.num_drafted > 0
    assert len(set(map(tuple, texts))) == 3


def test_the_context_ends_for_the_network_and_for_its_draft_model():
    long, short = (toy(decoder(LearnedPositions(num_positions=number))) for number in (CONTEXT, 12))
    row = TokenSequence([1, 2, 3], SamplingOptions(max_new_tokens=99))
    list(decode(long, [row]))
    expected = row.tokens
    assert len(expected) == CONTEXT - 2
    for drafter in PromptLookup(), DraftModel(short, 4), DraftModel(long, 4):
        assert speculate(long, drafter, [1, 2, 3], max_new_tokens=99) == expected


# --- calls of the network


def test_text_that_repeats_takes_fewer_calls_than_tokens():
    network = tiny_network()
    tally = Tally()
    text = speculate(network, PromptLookup(num_tokens=8), [5, 6, 7], tally, max_new_tokens=60)
    assert len(text) == 60
    assert tally.num_calls <= 20
    assert tally.num_calls + tally.num_accepted == 60
    assert tally.num_accepted <= tally.num_drafted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_equal_to_the_network_is_always_right(temperature):
    network, tally = tiny_network().double(), Tally()
    speculate(network, DraftModel(network, 4), [5, 6], tally, max_new_tokens=31, temperature=temperature, seed=1)
    assert tally == Tally(num_calls=1 + 30 // 5, num_drafted=24, num_accepted=24)


def test_the_network_reads_each_token_once_and_the_wrong_ones_beside():
    network, tally = tiny_network(), Tally()
    read = []
    network.decoder.register_forward_pre_hook(lambda module, given: read.append(given[0].shape[1]))
    text = plain(network, [5, 6], max_new_tokens=20)
    read.clear()
    speculate(network, Prophet(text, 2), [5, 6], tally, max_new_tokens=20)
    assert len(read) == tally.num_calls == 1 + -(-19 // 3)
    assert sum(read) == 2 + tally.num_drafted + tally.num_calls - 1


# --- sampled


def test_without_guesses_the_tokens_are_those_of_plain_sampling():
    network = tiny_network()
    for seed in range(10):
        options = {"temperature": 1.2, "top_k": 12, "top_p": 0.9, "min_p": 0.01, "seed": seed, "max_new_tokens": 12}
        assert speculate(network, NoGuess(), [5, 6], **options) == plain(network, [5, 6], **options)


STOP, LIMIT, NUM_DRAWS = 3, 4, 1000


def exact_law(network, prompt, processors, text=()):
    """The probability of every text, from whole sequences and transformers' filters."""
    with torch.inference_mode():
        logits = network(torch.tensor([[*prompt, *text]]))[:, -1]
    chances = processors(None, logits).softmax(dim=-1)[0].tolist()
    law = {}
    for token, chance in enumerate(chances):
        longer = (*text, token)
        if token == STOP or len(longer) == LIMIT:
            law[longer] = chance
        else:
            rest = exact_law(network, prompt, processors, longer)
            law |= {whole: chance * part for whole, part in rest.items()}
    return law


FILTERS = {
    "temperature": ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
    "top-k and top-p": (
        {"temperature": 1.5, "top_k": 3, "top_p": 0.85},
        [TemperatureLogitsWarper(1.5), TopKLogitsWarper(3), TopPLogitsWarper(0.85)],
    ),
}


@pytest.mark.parametrize("drafting", ["lookup", "model"])
@pytest.mark.parametrize("filters", FILTERS)
def test_sampled_texts_follow_the_exact_law(drafting, filters):
    network, other = (tiny_network(seed, vocab_size=4, num_layers=1) for seed in (4, 9))
    options, warpers = FILTERS[filters]
    prompt = [0, 1, 2, 1, 0, 2, 2, 0, 1]
    law = exact_law(network, prompt, LogitsProcessorList(warpers))
    assert sum(law.values()) == pytest.approx(1, abs=1e-5)
    tally, found = Tally(), Counter()
    for seed in range(NUM_DRAWS):
        drafter = PromptLookup(3, 1) if drafting == "lookup" else DraftModel(other, 3)
        tokens = speculate(network, drafter, prompt, tally, max_new_tokens=LIMIT, stop_ids=[STOP], seed=seed, **options)
        found[tuple(tokens)] += 1
    assert 0.2 < tally.num_accepted / tally.num_drafted < 0.9
    assert all(law[text] > 0 for text in found)
    likely = [text for text in law if law[text] * NUM_DRAWS >= 5]
    rare = [text for text in law if 0 < law[text] * NUM_DRAWS < 5]
    counts = [found[text] for text in likely] + [sum(found[text] for text in rare)] * bool(rare)
    chances = [law[text] for text in likely] + [sum(law[text] for text in rare)] * bool(rare)
    statistic = chi_square(torch.tensor(counts), torch.tensor(chances))
    assert len(counts) > 15
    assert statistic < chi_square_bound(len(counts) - 1)


class Tilted(DraftModel):
    """Guesses from q whatever the text."""

    q = torch.tensor([0.6, 0.3, 0.05, 0.05])

    def read(self, text):
        return self.q.log()[None]


def test_guess_verdict_and_token_are_independent_draws():
    """One step with p far from q: any noise that two of the three share moves p by several hundredths."""
    p = torch.tensor([0.05, 0.45, 0.1, 0.4])
    network, counts = tiny_network(vocab_size=4), torch.zeros(4)
    for seed in range(3000):
        row = TokenSequence([1], SamplingOptions(temperature=1.0, seed=seed))
        draft = Tilted(network, 1).draft(row, 1)
        counts[verify(network, row, draft, p.log().expand(2, 4))[0]] += 1
    assert chi_square(counts, p) < chi_square_bound(3)


# --- in the manner of decode


def test_log_probabilities_are_those_of_decode():
    network = tiny_network()
    rows = [TokenSequence([5, 6, 7], SamplingOptions(max_new_tokens=30, logprobs=3)) for _ in range(2)]
    assert list(decode(network, rows[:1])) == list(decode_speculatively(network, rows[1], PromptLookup()))
    assert rows[0].tokens == rows[1].tokens
    assert len(rows[1].logprobs) == 30
    for one, other in zip(rows[0].logprobs, rows[1].logprobs, strict=True):
        assert torch.equal(one.top_ids, other.top_ids)
        torch.testing.assert_close(one.chosen, other.chosen)
        torch.testing.assert_close(one.top, other.top)


def test_whoever_reads_may_end_the_row_at_any_token():
    network = tiny_network()
    row = TokenSequence([5, 6, 7], SamplingOptions(max_new_tokens=60))
    for _ in decode_speculatively(network, row, PromptLookup()):
        row.done = len(row.tokens) == 33
    assert row.tokens == plain(network, [5, 6, 7], max_new_tokens=33)


def test_a_draft_model_that_was_interrupted_serves_again(monkeypatch):
    network, drafter = tiny_network(), DraftModel(tiny_network(seed=1))
    drafter.draft(TokenSequence([5, 6, 7], SamplingOptions()), 3)
    with monkeypatch.context() as patch:
        patch.setattr(drafter.cache, "advance", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            drafter.draft(TokenSequence([5, 6, 7, 8, 9], SamplingOptions()), 3)
    options = {"max_new_tokens": 12}
    assert speculate(network, drafter, [5, 6, 7, 8, 9], **options) == plain(network, [5, 6, 7, 8, 9], **options)


def test_a_long_prompt_is_read_in_pieces(monkeypatch):
    monkeypatch.setattr("clearhead.generation.decode.PIECE", 10)
    network, prompt = toy(CONFIGS["window"]), list(range(1, 24))
    read = []
    network.decoder.register_forward_pre_hook(lambda module, given: read.append(given[0].shape[1]))
    row = TokenSequence(prompt, SamplingOptions(max_new_tokens=6))
    list(decode_speculatively(network, row, PromptLookup()))
    assert read[:3] == [10, 10, 3]
    assert row.tokens == plain(network, prompt, max_new_tokens=6)


# --- guesses


def guesses(text, drafter, count=6):
    cut = len(text) // 2
    row = TokenSequence(text[:cut], SamplingOptions(), tokens=text[cut:])
    return drafter.draft(row, count).tokens


def test_lookup_copies_what_followed():
    assert guesses([1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 3], PromptLookup()) == [4, 5, 6, 7, 8, 9]
    assert guesses([1, 2, 3, 4, 5, 6], PromptLookup()) == []
    assert guesses([7], PromptLookup()) == []


def test_lookup_prefers_the_longest_match_then_the_latest():
    assert guesses([2, 3, 4, 8, 3, 4, 9, 2, 3, 4], PromptLookup(ngram=3), 1) == [8]
    assert guesses([2, 3, 4, 8, 3, 4, 9, 2, 3, 4], PromptLookup(ngram=2), 1) == [9]


def test_lookup_runs_on_into_its_own_copy():
    assert guesses([4, 7, 7], PromptLookup()) == [7] * 6
    assert guesses([9, 1, 2, 3, 1, 2, 3], PromptLookup(), 8) == [1, 2, 3, 1, 2, 3, 1, 2]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_lookup_guess_is_a_continuation_that_occurs(size, generator):
    for _ in range(50):
        text = torch.randint(4, (30,), generator=generator).tolist()
        found = guesses(text, PromptLookup(ngram=size), 3)
        whole = text + found
        starts = range(len(text) - 1)
        assert any(text[-1:] + found == whole[n : n + 1 + len(found)] for n in starts) == bool(found)


# --- refused


def test_impossible_drafters_are_refused():
    for make in (lambda: PromptLookup(0), lambda: PromptLookup(ngram=0), lambda: DraftModel(tiny_network(), 1.5)):
        with pytest.raises(ClearheadError, match="it must be a whole number, 1 or more"):
            make()
    with pytest.raises(ClearheadError, match="the draft model has 30 tokens and the network 31; take one"):
        speculate(tiny_network(), DraftModel(tiny_network(vocab_size=30)), [1])
    with pytest.raises(ClearheadError, match="text is empty"):
        speculate(tiny_network(), PromptLookup(), [])
