"""The decode loop of the engine: the same tokens, finish reasons and texts as the loop of decoding.py."""

import pytest

from clearhead.engine import EngineProvider
from clearhead.errors import ClearheadError
from clearhead.generation import TokenSequence, decode
from clearhead.generation.engine_decoding import can_decode_in_engine, decode_in_engine
from clearhead.options import SamplingOptions
from tests.model.toys import POSITIONS, decoder, toy

PROMPTS = [[1, 2, 3, 4, 5], [6], [7, 8, 9]]


@pytest.fixture
def provider():
    return EngineProvider(toy(decoder()))


def sequences(**options):
    return [TokenSequence(prompt, SamplingOptions(**options)) for prompt in PROMPTS]


@pytest.mark.parametrize("options", [{"max_new_tokens": 9}, {"max_new_tokens": 9, "temperature": 1.0, "seed": 3}])
def test_the_tokens_of_the_padded_loop(provider, options):
    found, expected = sequences(**options), sequences(**options)
    for _ in decode_in_engine(provider, found):
        pass
    for _ in decode(provider.network, expected):
        pass
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    assert [each.finish_reason for each in found] == [each.finish_reason for each in expected]


def test_log_probabilities_are_those_of_the_padded_loop(provider):
    found, expected = sequences(max_new_tokens=4, logprobs=2), sequences(max_new_tokens=4, logprobs=2)
    list(decode_in_engine(provider, found))
    list(decode(provider.network, expected))
    for ours, theirs in zip(found, expected, strict=True):
        assert [float(step.chosen) for step in ours.logprobs] == pytest.approx(
            [float(step.chosen) for step in theirs.logprobs]
        )
        assert [step.top_ids.tolist() for step in ours.logprobs] == [step.top_ids.tolist() for step in theirs.logprobs]


def test_a_model_with_learned_positions_ends_at_its_last_position():
    network = toy(decoder(position=POSITIONS["learned"]))
    found, expected = sequences(max_new_tokens=100), sequences(max_new_tokens=100)
    list(decode_in_engine(EngineProvider(network), found))
    list(decode(network, expected))
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    assert {each.finish_reason for each in found} == {"context"}


def test_a_sequence_that_the_caller_finishes_leaves_the_engine(provider):
    found = sequences(max_new_tokens=9)
    for number, _ in enumerate(decode_in_engine(provider, found)):
        if number == 2:
            found[0].finished = True
    assert [len(each.tokens) for each in found] == [3, 9, 9]


def test_a_loop_that_is_given_up_releases_its_pages(provider):
    steps = decode_in_engine(provider, sequences(max_new_tokens=9))
    next(steps)
    steps.close()
    engine = provider._shared.engine
    engine.step()
    assert not engine.has_work
    assert engine.scheduler.pool.num_used == 0


def test_an_error_of_one_sequence_is_raised(provider, monkeypatch):
    steps = decode_in_engine(provider, sequences(max_new_tokens=9))
    next(steps)

    def fails(items):
        raise RuntimeError("broken")

    monkeypatch.setattr(type(provider._shared.engine.executor), "start", lambda self, items: fails(items))
    with pytest.raises(ClearheadError, match="failed with RuntimeError: broken"):
        list(steps)


def test_bad_sequences_are_refused_before_the_first_step(provider):
    with pytest.raises(ClearheadError, match="out of range"):
        decode_in_engine(provider, [TokenSequence([99], SamplingOptions())])


def test_sequences_with_a_cache_of_their_own_are_not_for_the_engine(provider):
    assert can_decode_in_engine(provider, sequences())
    assert not can_decode_in_engine(provider, [TokenSequence([1], SamplingOptions(), cached_tokens=[2])])
