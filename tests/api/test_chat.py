"""A chat keeps its cache between turns and gives the same answers as a model that reads everything again."""

import pytest

from clearhead.api import Model, create
from clearhead.errors import ClearheadError
from clearhead.families.gpt import gpt_config
from clearhead.families.gpt_style import multi_head_attention
from clearhead.tokenization.characters import byte_tokenizer
from clearhead.tokenization.chat_template import render_chat
from tests.checkpoint.tiny import tiny_network

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


class TemplateTokenizer:
    """A byte tokenizer with a chat template."""

    def __init__(self):
        self.inner = byte_tokenizer()
        self.chat_template = TEMPLATE

    def __getattr__(self, name):
        return getattr(self.inner, name)


def chat_model(**changes):
    tokenizer = TemplateTokenizer()
    return Model(tiny_network(vocab_size=tokenizer.vocab_size, **changes), tokenizer)


@pytest.mark.parametrize("window", [None, 6])
def test_answers_equal_those_of_a_model_without_the_cache(window):
    chat = chat_model(window=window).chat(system="Be kind.")
    answers = [chat.say(text, max_new_tokens=9) for text in ("Hello", "And then?", "Why?")]
    assert [message["role"] for message in chat.messages] == ["system", *["user", "assistant"] * 3]
    for turn in range(3):
        before = chat.messages[: 2 + 2 * turn]
        fresh = chat_model(window=window)
        ids = fresh.tokenizer.encode(render_chat(fresh.tokenizer, before), add_special_tokens=False)
        assert fresh.generate(ids, max_new_tokens=9).text == answers[turn]


def test_only_new_tokens_are_read():
    chat = chat_model().chat()
    chat.say("A long first question, to be read once.", max_new_tokens=5)
    first = chat.num_prompt_tokens
    chat.say("Short", max_new_tokens=5)
    assert chat.num_prompt_tokens < first
    assert len(chat.cached_tokens) == chat.cache.length


def test_an_answer_that_is_closed_early_stays_in_the_conversation():
    chat = chat_model().chat()
    pieces = chat.stream("Tell me", max_new_tokens=30)
    text = next(pieces) + next(pieces)
    pieces.close()
    assert chat.messages[-1] == {"role": "assistant", "content": text}
    assert chat.last_generation.finish_reason == "unfinished"
    assert len(chat.cached_tokens) == chat.cache.length
    chat.say("Go on", max_new_tokens=3)


def test_reset_starts_a_new_conversation():
    chat = chat_model().chat(system="S")
    first = chat.say("Hi", max_new_tokens=6)
    chat.reset()
    assert chat.cache.length == 0
    assert chat.say("Hi", max_new_tokens=6) == first


def test_a_model_without_a_chat_template_raises_before_the_first_message():
    tokenizer = byte_tokenizer()
    plain = Model(tiny_network(vocab_size=tokenizer.vocab_size), tokenizer)
    with pytest.raises(ClearheadError, match="no chat template"):
        plain.chat()
    with pytest.raises(ClearheadError, match="no tokenizer"):
        Model(tiny_network()).chat()


@pytest.mark.parametrize(("text", "options"), [("Hi", {"temprature": 1}), ("Hi", {"top_p": 0}), (7, {})])
def test_a_turn_with_invalid_arguments_does_not_change_the_conversation(text, options):
    chat = chat_model().chat()
    with pytest.raises(ClearheadError):
        chat.stream(text, **options)
    assert chat.messages == []


@pytest.mark.parametrize("system", [5, ["Be kind."]])
def test_a_system_message_must_be_a_text(system):
    with pytest.raises(ClearheadError, match="it must be a text"):
        chat_model().chat(system=system)


def test_a_turn_that_fails_before_its_first_token_does_not_change_the_conversation(monkeypatch):
    chat = chat_model().chat()
    first = chat.say("Hello", max_new_tokens=6)
    messages = list(chat.messages)
    hidden = chat.text_generator.network.hidden_states
    monkeypatch.setattr(chat.text_generator.network, "hidden_states", lambda *inputs, **options: [0] * 2**62)
    with pytest.raises(ClearheadError, match="not enough memory"):
        chat.say("Why?", max_new_tokens=6)
    assert chat.messages == messages
    monkeypatch.setattr(chat.text_generator.network, "hidden_states", hidden)
    second = chat.say("Why?", max_new_tokens=6)
    again = chat_model().chat()
    assert [again.say(text, max_new_tokens=6) for text in ("Hello", "Why?")] == [first, second]


def test_a_stream_that_is_never_iterated_does_not_change_the_conversation():
    chat = chat_model().chat()
    chat.stream("Hi")
    assert chat.messages == []


@pytest.mark.parametrize("afterwards", [lambda chat: chat.say("Go on", max_new_tokens=4), lambda chat: chat.reset()])
def test_an_open_answer_ends_when_the_conversation_continues(afterwards):
    """As in a notebook, where a loop over the pieces was interrupted and their variable still exists."""
    chat, closed = chat_model().chat(), chat_model().chat()
    open_answer, closed_answer = (each.stream("Tell me", max_new_tokens=30) for each in (chat, closed))
    assert [next(open_answer), next(open_answer)] == [next(closed_answer), next(closed_answer)]
    closed_answer.close()
    for each in (chat, closed):
        afterwards(each)
    assert list(open_answer) == []
    assert chat.messages == closed.messages
    assert len(chat.cached_tokens) == chat.cache.length
    assert chat.say("Why?", max_new_tokens=4) == closed.say("Why?", max_new_tokens=4)


@pytest.mark.parametrize("option", ["n", "beams", "speculate"])
def test_arguments_of_generate_many_raise(option):
    with pytest.raises(ClearheadError, match=f"chat does not support {option}; generate_many does"):
        chat_model().chat().say("Hi", **{option: 2})


def test_a_conversation_ends_with_the_learned_positions():
    tokenizer = TemplateTokenizer()
    config = gpt_config(width=16, attentions=[multi_head_attention(16, 4)], vocab_size=tokenizer.vocab_size, context=64)
    chat = create(config, tokenizer).chat()
    chat.say("Hello", max_new_tokens=100)
    assert chat.last_generation.finish_reason == "context"
    messages = list(chat.messages)
    with pytest.raises(ClearheadError, match="this model reads at most 64"):
        chat.say("And then?", max_new_tokens=3)
    assert chat.messages == messages
    chat.reset()
    assert len(chat.say("Hi", max_new_tokens=3)) > 0


def test_tokens_past_the_context_are_counted():
    chat = chat_model(context=24).chat()
    chat.say("Hi", max_new_tokens=5)
    assert chat.last_generation.num_past_context == 0
    chat.say("And then?", max_new_tokens=5)
    assert chat.last_generation.num_past_context > 0


def test_repr_counts_messages_and_cached_tokens():
    chat = chat_model().chat(system="Be kind.")
    assert repr(chat) == "Chat(1 messages, 0 tokens in the cache)"
    chat.say("1 < 2?", max_new_tokens=3)
    assert repr(chat) == f"Chat(3 messages, {chat.cache.length} tokens in the cache)"
    html = chat._repr_html_()
    assert "<th>user</th>" in html
    assert "1 &lt; 2?" in html
