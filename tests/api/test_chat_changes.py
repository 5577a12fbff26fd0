"""undo, regenerate, load and a new system message give the answers of a conversation that is read from the start."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.architecture import Rope
from clearhead.cache import KeyValueCache
from clearhead.errors import ClearheadError
from clearhead.tokenization import read_conversation
from clearhead.tokenization.chat_template import render_chat
from tests.api.test_chat import chat_model
from tests.checkpoint.tiny import longrope

WINDOWS = pytest.mark.parametrize("window", [None, 6, 40])
PLAIN_ROPE = Rope()
GREEDY = {"max_new_tokens": 7, "logprobs": 0}


def fresh_answer(messages, window=None, rope=PLAIN_ROPE, **options):
    """Return the answer of a model that reads all messages."""
    model = chat_model(window=window, rope=rope)
    ids = model.tokenizer.encode(render_chat(model.tokenizer, messages), add_special_tokens=False)
    return model.generate(ids, **GREEDY | options)


def check_last_answer(chat, window=None, rope=PLAIN_ROPE, **options):
    """Compare the last answer with that of a model that reads the conversation from the start."""
    assert chat.messages[-1]["role"] == "assistant"
    answer, expected = chat.last_generation, fresh_answer(chat.messages[:-1], window, rope, **options)
    assert answer.tokens == expected.tokens
    assert answer.logprobs == pytest.approx(expected.logprobs)
    assert len(chat.cached_tokens) == chat.cache.length


@pytest.fixture
def answered():
    """Return a chat with two answers."""

    def start(window=None, system=None):
        chat = chat_model(window=window).chat(system)
        for text in ("Hello there", "And then?"):
            chat.say(text, **GREEDY)
        return chat

    return start


# --- the same tokens as a fresh conversation


@WINDOWS
def test_the_answer_after_undo(answered, window):
    chat = answered(window, "Be kind.")
    first_answer = chat.messages[2]
    assert chat.undo() == "And then?"
    assert chat.messages[2:] == [first_answer]
    chat.say("Why?", **GREEDY)
    check_last_answer(chat, window)


@pytest.mark.parametrize("original_context", [30, 60, 75, 100])
def test_answers_on_both_sides_of_the_original_context_of_longrope(original_context):
    """The conversation outgrows it in an answer or between two, and is below it again after an undo."""
    rope = longrope(original_context)
    chat = chat_model(rope=rope).chat()
    for text in ("Hello there", "And then?", "Why?"):
        chat.say(text, **GREEDY)
        check_last_answer(chat, rope=rope)
    assert chat.cache.length > original_context
    for _ in range(3):
        chat.undo()
    chat.say("Hi", **GREEDY)
    check_last_answer(chat, rope=rope)


@WINDOWS
def test_all_messages_can_be_undone(answered, window):
    chat = answered(window, "Be kind.")
    assert [chat.undo(), chat.undo()] == ["And then?", "Hello there"]
    assert chat.messages == [{"role": "system", "content": "Be kind."}]
    with pytest.raises(ClearheadError, match="nothing to undo; the conversation has no message of the user yet"):
        chat.undo()
    chat.say("Why?", **GREEDY)
    check_last_answer(chat, window)


@WINDOWS
def test_a_regenerated_answer_is_that_of_a_fresh_conversation(answered, window):
    chat = answered(window)
    old = chat.messages[-1]["content"]
    assert chat.regenerate(**GREEDY) == old
    assert len(chat.messages) == 4
    check_last_answer(chat, window)
    sampling = {"temperature": 1.5, "seed": 11}
    assert chat.regenerate(**GREEDY | sampling) != old
    check_last_answer(chat, window, **sampling)
    chat.say("Why?", **GREEDY)
    check_last_answer(chat, window)


@WINDOWS
@pytest.mark.parametrize("system", ["Be rude.", "Be kind. And quick.", None])
def test_the_answer_after_a_new_system_message(answered, window, system):
    chat = answered(window, "Be kind.")
    rest = chat.messages[1:]
    chat.system = system
    assert chat.system == system
    assert chat.messages == ([] if system is None else [{"role": "system", "content": system}]) + rest
    chat.say("Why?", **GREEDY)
    check_last_answer(chat, window)


@WINDOWS
def test_the_answer_after_load(answered, window, tmp_path):
    saved, other = answered(window, "Be kind."), chat_model(window=window).chat()
    saved.save(tmp_path / "talk.json")
    other.say("Something else entirely", **GREEDY)
    other.load(tmp_path / "talk.json")
    assert other.messages == saved.messages
    assert other.last_generation is None
    assert other.say("Why?", **GREEDY) == saved.say("Why?", **GREEDY)
    check_last_answer(other, window)


ACTIONS = st.lists(
    st.sampled_from(["say", "sample", "close", "undo", "regenerate", "system", "load", "reset"]), max_size=7
)


@settings(max_examples=25, deadline=None)
@given(actions=ACTIONS, window=st.sampled_from([None, 6, 40]))
def test_the_answer_after_any_sequence_of_changes(actions, window, tmp_path_factory):
    path = tmp_path_factory.mktemp("talk") / "talk.json"
    chat = chat_model(window=window).chat("Be kind.")
    chat.say("Hello", **GREEDY)
    chat.save(path)
    for number, action in enumerate(actions):
        has_question = any(message["role"] == "user" for message in chat.messages)
        match action:
            case "say":
                chat.say(f"Text {number}", **GREEDY)
            case "sample":
                chat.say(f"Text {number}", **GREEDY, temperature=1.0, seed=number)
            case "close":
                pieces = chat.stream("Count", max_new_tokens=30)
                next(pieces)
                pieces.close()
            case "undo" if has_question:
                chat.undo()
            case "regenerate" if has_question:
                chat.regenerate(**GREEDY, temperature=1.0, seed=number)
            case "system":
                chat.system = None if number % 2 else f"System {number}"
            case "load":
                chat.load(path)
            case "reset":
                chat.reset()
    chat.say("Why?", **GREEDY)
    check_last_answer(chat, window)


@pytest.mark.parametrize("window", [None, 40])
def test_an_interrupt_inside_a_step_does_not_spoil_the_cache(window, monkeypatch):
    """As Ctrl-C may: the keys and values are in place, but the cache has not counted them."""
    chat = chat_model(window=window).chat("Be kind.")
    chat.say("Hello", max_new_tokens=1)  # the cache has only tokens of the prompt, which the next turns share
    before = list(chat.messages)
    advance = KeyValueCache.advance

    def interrupted(cache):
        length = cache.length
        advance(cache)
        cache.length = length
        raise KeyboardInterrupt

    monkeypatch.setattr(KeyValueCache, "advance", interrupted)
    with pytest.raises(KeyboardInterrupt):
        chat.say("A longer message, so that the tokens in the window are overwritten", **GREEDY)
    monkeypatch.undo()
    assert chat.messages[: len(before)] == before
    chat.say("Why?", **GREEDY)
    check_last_answer(chat, window)


def test_regenerate_answers_a_loaded_question(tmp_path):
    messages = [{"role": "user", "content": "Hello"}]
    (tmp_path / "talk.json").write_text(json.dumps({"messages": messages}))
    chat = chat_model().chat()
    chat.load(tmp_path / "talk.json")
    assert chat.regenerate(**GREEDY) == chat.messages[-1]["content"]
    assert chat.messages[:-1] == messages
    check_last_answer(chat)


def test_regenerate_with_invalid_options_keeps_the_old_answer(answered):
    chat = answered()
    before = list(chat.messages)
    with pytest.raises(ClearheadError, match="top_p is 0"):
        chat.regenerate(top_p=0)
    assert chat.messages == before


def test_a_system_message_that_the_template_rejects_changes_nothing(answered):
    chat = answered()
    before = list(chat.messages)
    chat.tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        + chat.tokenizer.chat_template
    )
    with pytest.raises(ClearheadError, match="no system role"):
        chat.system = "Be kind."
    assert chat.messages == before
    assert chat.system is None


# --- files


def test_a_saved_conversation_is_one_line_of_the_messages_format(answered, tmp_path):
    chat = answered(system="Ü, 日本, two\nlines")
    chat.save(str(tmp_path / "talk.json"))
    (line,) = (tmp_path / "talk.json").read_text(encoding="utf-8").splitlines()
    assert json.loads(line) == {"messages": chat.messages}
    assert read_conversation(tmp_path / "talk.json") == chat.messages
    assert [path.name for path in tmp_path.iterdir()] == ["talk.json"]


def test_saved_conversations_are_training_data(answered, tmp_path):
    from clearhead.data.sources import read_chats

    for name in "ab":
        answered().save(tmp_path / f"{name}.jsonl")
    joined = "".join((tmp_path / f"{name}.jsonl").read_text() for name in "ab")
    (tmp_path / "all.jsonl").write_text(joined)
    assert len(list(read_chats(tmp_path / "all.jsonl"))) == 2


def test_a_path_that_cannot_be_written_is_one_error(answered, tmp_path):
    with pytest.raises(ClearheadError, match=r"missing/talk\.json cannot be written: No such file or directory"):
        answered().save(tmp_path / "missing" / "talk.json")


NONSENSE = {
    "[]": "is not a conversation",
    "{}": "is not a conversation",
    '{"messages": {}}': "is not a conversation",
    '{"messages": [1]}': "message 1 of .* is not an object with a role and a content",
    '{"messages": [{"role": "user"}]}': "message 1 of .* is not an object with a role and a content",
    '{"messages": [{"role": "user", "content": 3}]}': "message 1 of .* is not an object",
    '{"messages": [{"role": "robot", "content": "Hi"}]}': "has the role 'robot'; it must be system or user",
    '{"messages": [{"role": "user", "content": "Hi", "tool_calls": []}]}': "has the key 'tool_calls'; use only role",
    '{"messages": [{"role": "user", "content": "Hi"}, {"role": "system", "content": "S"}]}': "only the first one can",
    '{"messages": []}{"messages": []}': "not valid JSON",
    '{"messages": [{"role": "user", "content": "\\ud800"}]}': "unpaired surrogate",
    "[" * 5000: "not valid JSON",
    "\x00": "not valid JSON",
}


@pytest.mark.parametrize("content", NONSENSE, ids=range(len(NONSENSE)))
def test_nonsense_is_one_error_and_changes_nothing(content, tmp_path):
    path = tmp_path / "talk.json"
    path.write_text(content)
    chat = chat_model().chat("S")
    chat.say("Hello", **GREEDY)
    before = list(chat.messages)
    with pytest.raises(ClearheadError, match=NONSENSE[content]) as raised:
        chat.load(path)
    assert len(str(raised.value)) < 500
    assert chat.messages == before


def test_a_file_of_many_megabytes_is_not_read(tmp_path):
    path = tmp_path / "talk.json"
    path.write_bytes(b" " * (1 << 23))
    with pytest.raises(ClearheadError, match="at most 4194304 can be read"):
        read_conversation(path)
