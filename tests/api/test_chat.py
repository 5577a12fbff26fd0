"""A chat keeps its cache between turns, and says what a fresh one would."""

import pytest

from clearhead.api import Model, create
from clearhead.errors import ClearheadError
from clearhead.families.gpt import gpt
from clearhead.families.plain import multi_head
from clearhead.tokenization.characters import byte_tokenizer
from clearhead.tokenization.chat import render_chat
from tests.checkpoint.tiny import tiny_network

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


class Templated:
    """A byte tokenizer with a chat template."""

    def __init__(self):
        self.inner = byte_tokenizer()
        self.chat_template = TEMPLATE

    def __getattr__(self, name):
        return getattr(self.inner, name)


def model(**changes):
    tokenizer = Templated()
    return Model(tiny_network(vocab_size=tokenizer.vocab_size, **changes), tokenizer)


@pytest.mark.parametrize("window", [None, 6])
def test_turns_equal_those_of_a_fresh_model(window):
    chat = model(window=window).chat(system="Be kind.")
    answers = [chat.say(text, max_new_tokens=9) for text in ("Hello", "And then?", "Why?")]
    assert [message["role"] for message in chat.messages] == ["system", *["user", "assistant"] * 3]
    for turn in range(3):
        before = chat.messages[: 2 + 2 * turn]
        fresh = model(window=window)
        ids = fresh.tokenizer.encode(render_chat(fresh.tokenizer, before), add_special_tokens=False)
        assert fresh.generate(ids, max_new_tokens=9).text == answers[turn]


def test_only_what_is_new_is_read():
    chat = model().chat()
    chat.say("A long first question, to be read once.", max_new_tokens=5)
    first = chat.num_read
    chat.say("Short", max_new_tokens=5)
    assert chat.num_read < first
    assert len(chat.held) == chat.cache.length


def test_an_answer_cut_short_stays_in_the_conversation():
    chat = model().chat()
    pieces = chat.stream("Tell me", max_new_tokens=30)
    said = next(pieces) + next(pieces)
    pieces.close()
    assert chat.messages[-1] == {"role": "assistant", "content": said}
    assert chat.last.finish_reason == "nothing"
    assert len(chat.held) == chat.cache.length
    chat.say("Go on", max_new_tokens=3)


def test_reset_forgets():
    chat = model().chat(system="S")
    first = chat.say("Hi", max_new_tokens=6)
    chat.reset()
    assert chat.cache.length == 0
    assert chat.say("Hi", max_new_tokens=6) == first


def test_a_model_without_template_says_so_before_the_first_question():
    tokenizer = byte_tokenizer()
    plain = Model(tiny_network(vocab_size=tokenizer.vocab_size), tokenizer)
    with pytest.raises(ClearheadError, match="no chat template"):
        plain.chat()
    with pytest.raises(ClearheadError, match="no tokenizer"):
        Model(tiny_network()).chat()


@pytest.mark.parametrize(("text", "options"), [("Hi", {"temprature": 1}), ("Hi", {"top_p": 0}), (7, {})])
def test_a_turn_that_cannot_start_leaves_no_trace(text, options):
    chat = model().chat()
    with pytest.raises(ClearheadError):
        chat.stream(text, **options)
    assert chat.messages == []


@pytest.mark.parametrize("system", [5, ["Be kind."]])
def test_a_system_message_is_a_text(system):
    with pytest.raises(ClearheadError, match="it must be a text"):
        model().chat(system=system)


def test_a_turn_without_a_token_leaves_no_trace(monkeypatch):
    chat = model().chat()
    first = chat.say("Hello", max_new_tokens=6)
    messages = list(chat.messages)
    hidden = chat.text_generator.network.hidden_states
    monkeypatch.setattr(chat.text_generator.network, "hidden_states", lambda *given, **options: [0] * 2**62)
    with pytest.raises(ClearheadError, match="not enough memory"):
        chat.say("Why?", max_new_tokens=6)
    assert chat.messages == messages
    monkeypatch.setattr(chat.text_generator.network, "hidden_states", hidden)
    second = chat.say("Why?", max_new_tokens=6)
    again = model().chat()
    assert [again.say(text, max_new_tokens=6) for text in ("Hello", "Why?")] == [first, second]


def test_a_turn_never_listened_to_leaves_no_trace():
    chat = model().chat()
    chat.stream("Hi")
    assert chat.messages == []


@pytest.mark.parametrize("afterwards", [lambda chat: chat.say("Go on", max_new_tokens=4), lambda chat: chat.reset()])
def test_an_answer_left_open_ends_when_the_conversation_goes_on(afterwards):
    """As in a notebook: the loop over the pieces was left, and their name still stands."""
    chat, closed = model().chat(), model().chat()
    left, ended = (listener.stream("Tell me", max_new_tokens=30) for listener in (chat, closed))
    assert [next(left), next(left)] == [next(ended), next(ended)]
    ended.close()
    for listener in (chat, closed):
        afterwards(listener)
    assert list(left) == []
    assert chat.messages == closed.messages
    assert len(chat.held) == chat.cache.length
    assert chat.say("Why?", max_new_tokens=4) == closed.say("Why?", max_new_tokens=4)


@pytest.mark.parametrize("option", ["n", "beams", "speculate"])
def test_options_of_generate_alone_are_refused_by_name(option):
    with pytest.raises(ClearheadError, match=f"a chat takes no {option}; generate_many does"):
        model().chat().say("Hi", **{option: 2})


def test_a_conversation_ends_with_learned_positions():
    tokenizer = Templated()
    config = gpt(width=16, attentions=[multi_head(16, 4)], vocab_size=tokenizer.vocab_size, context=64)
    chat = create(config, tokenizer).chat()
    chat.say("Hello", max_new_tokens=100)
    assert chat.last.finish_reason == "context"
    held = list(chat.messages)
    with pytest.raises(ClearheadError, match="this model reads 64 at most"):
        chat.say("And then?", max_new_tokens=3)
    assert chat.messages == held
    chat.reset()
    assert len(chat.say("Hi", max_new_tokens=3)) > 0


def test_a_conversation_beyond_the_context_says_so():
    chat = model(context=24).chat()
    chat.say("Hi", max_new_tokens=5)
    assert chat.last.num_past_context == 0
    chat.say("And then?", max_new_tokens=5)
    assert chat.last.num_past_context > 0
