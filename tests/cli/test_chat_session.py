"""`clearhead chat` line by line: commands, errors, Ctrl-C, and what is printed to stdout and stderr."""

import io
import json
import re
import sys

import pytest

from clearhead.cli.chat_commands import run_chat
from clearhead.cli.chat_settings import change_option, describe_options
from clearhead.errors import ClearheadError
from clearhead.options import SamplingOptions
from clearhead.tokenization.chat_template import render_chat
from tests.api.test_chat import chat_model
from tests.cli.test_commands import clearhead  # noqa: F401  (a fixture)


@pytest.fixture
def typed(monkeypatch, capsys):
    """Run a chat on these lines; return (chat, stdout, stderr)."""

    def run(*lines, chat=None, **options):
        chat = chat or chat_model().chat()
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        run_chat(chat, {"max_new_tokens": 8} | options)
        return chat, *capsys.readouterr()

    return run


def test_answers_go_to_stdout_and_statistics_to_stderr(typed):
    chat, out, err = typed("Hello", "", "Why?", chat=chat_model(context=128).chat())
    assert [message["role"] for message in chat.messages] == ["user", "assistant"] * 2
    assert out == "".join(f"{message['content']}\n" for message in chat.messages[1::2])
    line = r"^8 tokens, [\d.]+ per second; \d+ prompt tokens read, \d+ tokens in the cache; cut off at"
    assert len(re.findall(line, err, re.MULTILINE)) == 2


def test_quit_and_exit_end_the_chat(typed):
    for word in ("/quit", "/exit"):
        chat, out, _ = typed(word, "Hello")
        assert (chat.messages, out) == ([], "")


def test_history_reset_and_help(typed):
    chat, out, err = typed("Hello", "/history", "/reset", "/history", "/help")
    assert chat.messages == []
    assert err.count("user: Hello") == 1
    assert "The conversation is empty." in err
    for command in (
        "/system [TEXT]",
        "/undo",
        "/regenerate",
        "/save FILE",
        "/load FILE",
        "/set [NAME VALUE]",
        "/stats",
    ):
        assert re.search(rf"^{re.escape(command)}  ", err, re.MULTILINE)
    assert out.count("\n") >= 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/undoo", "error: unknown command '/undoo'; did you mean '/undo'? /help lists them, and a space before the /"),
        ("/dance", "error: unknown command '/dance'; /help lists them, and a space before the / sends the line"),
        ("/undo 3", "error: /undo is followed by '3'; it takes no argument"),
        ("/undo", "error: there is nothing to undo; the conversation has no message of the user yet"),
        ("/regenerate", "error: there is nothing to regenerate; the conversation has no message of the user yet"),
        ("/save", "error: /save needs a file; write /save talk.json"),
        ("/load", "error: /load needs a file that /save wrote; write /load talk.json"),
        ("/load nowhere.json", "error: nowhere.json cannot be read: No such file or directory"),
        ("/set temprature 1", "error: unknown option 'temprature'; did you mean 'temperature'?"),
        ("/set temperature warm", "error: temperature is 'warm'; it must be a number"),
        ("/set temperature -1", "error: temperature is -1.0; it must be 0 for the most likely token, or from"),
        ("/set top_k 1.5", "error: top_k is '1.5'; it must be a whole number, or none"),
        ("/set top_k 0", "error: top_k is 0; it must be a whole number, 1 or more"),
        ("/set top_p 0.9", "error: top_p has no effect at temperature 0"),
        ("/set logit_bias 5", "error: logit_bias is ''; it must be token ids with a number each, such as 42=-1.5"),
        ('/set stop ["a"', "error: stop is '[\"a\"'; it must be a text, or JSON such as"),
    ],
)
def test_a_mistake_is_one_line_and_does_not_end_the_chat(typed, line, message):
    chat, _, err = typed(line, "Hello")
    assert err.startswith(message)
    assert len(chat.messages) == 2


def test_a_space_before_the_slash_makes_it_a_message(typed):
    chat, _, _ = typed(" /usr/bin is a folder")
    assert chat.messages[0] == {"role": "user", "content": "/usr/bin is a folder"}


def test_commands_change_the_conversation(typed):
    chat, out, err = typed("/system Be kind.", "Hello", "Why?", "/undo", "/system", "/regenerate", "/system none")
    assert [message["role"] for message in chat.messages] == ["user", "assistant"]
    assert chat.messages[0]["content"] == "Hello"
    assert err.count("System message: Be kind.") == 2
    assert "Removed: Why?" in err
    assert "At temperature 0 the answer is the same again; /set temperature 0.7 samples another one." in err
    assert "There is no system message." in err
    assert out.count("\n") >= 3


def test_regenerate_samples_another_answer(typed):
    chat, _, err = typed("Hello", "/regenerate", temperature=1.5)
    assert len(chat.messages) == 2
    assert "same again" not in err
    _, _, err = typed("Hello", "/regenerate", temperature=1.5, seed=3)
    assert "With a seed the answer is the same again; /set seed none samples another one." in err


def test_save_and_load(typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved, _, err = typed("Hello", "/save my talk.json", "Why?", "/save", "/save other.json")
    assert "Saved 2 messages to my talk.json" in err
    assert "Saved 4 messages to my talk.json" in err
    assert json.loads((tmp_path / "other.json").read_text()) == {"messages": saved.messages}
    loaded, _, err = typed("/load my talk.json", "And?", "/save")
    assert loaded.messages[:4] == saved.messages
    assert "Loaded 4 messages from my talk.json; /history shows them." in err
    assert len(json.loads((tmp_path / "my talk.json").read_text())["messages"]) == 6


def test_save_does_not_replace_another_file(typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.json").write_text("mine")
    _, _, err = typed("Hello", "/save notes.json")
    assert "error: notes.json already exists; /save --overwrite notes.json replaces it" in err
    assert (tmp_path / "notes.json").read_text() == "mine"
    typed("Hello", "/save --overwrite notes.json")
    assert "messages" in json.loads((tmp_path / "notes.json").read_text())


def test_set_changes_the_next_answer(typed):
    _, _, err = typed("/set max-new-tokens 3", "Hello", "/set max_new_tokens=5", "Why?", "/set max_new_tokens")
    assert re.findall(r"^(\d+) tokens,", err, re.MULTILINE) == ["3", "5"]
    assert err.count("max_new_tokens 5") == 2


def test_set_lists_all_options(typed):
    _, _, err = typed("/set", temperature=0.5)
    assert "temperature 0.5\n" in err
    assert "top_p none\n" in err
    assert "max_new_tokens 8\n" in err


def test_stats(typed):
    _, _, err = typed("Hello", "/stats", chat=chat_model(context=128).chat())
    assert "conversation: 2 messages" in err
    assert re.search(r"cache: \d+ of 128 tokens of the context, [\d.]+ MB", err)
    assert re.search(
        r"last answer: 8 tokens in [\d.]+ s, [\d.]+ per second; the first after [\d.]+ s and \d+ prompt", err
    )
    assert re.search(r"all 1 answers: 8 tokens", err)
    assert "options: max_new_tokens 8" in err


SETTINGS = [
    ("temperature", "0.7", 0.7),
    ("top_k", "40", 40),
    ("--top-p", "0.9", 0.9),
    ("seed", "-3", -3),
    ("stop", "END", ("END",)),
    ("stop", '"\\n\\n"', ("\n\n",)),
    ("stop", '["a", "b"]', ("a", "b")),
    ("stop_ids", "2 11", (2, 11)),
    ("logit_bias", "42=-1.5 7=2", ((42, -1.5), (7, 2.0))),
]


@pytest.mark.parametrize(("name", "text", "value"), SETTINGS)
def test_every_kind_of_option_can_be_set_shown_and_turned_off(name, text, value):
    options = change_option({"temperature": 1.0}, name, text)
    key = name.strip("-").replace("-", "_")
    assert options[key] == value
    shown = next(line for line in describe_options(options) if line.startswith(f"{key} "))
    assert change_option({"temperature": 1.0}, *shown.split(" ", 1)) == options
    if key != "temperature":
        assert change_option(options, name, "none") == {"temperature": 1.0}
    SamplingOptions(**options)


def test_a_wrong_option_names_the_nearest():
    with pytest.raises(ClearheadError, match="did you mean 'repetition_penalty'"):
        change_option({}, "repetition_penalti", "1.2")


@pytest.mark.parametrize("content", ["nonsense", '{"messages": 3}'])
def test_a_wrong_file_is_answered_before_the_model_is_loaded(clearhead, tmp_path, monkeypatch, content):  # noqa: F811
    (tmp_path / "talk.json").write_text(content)
    monkeypatch.setattr("clearhead.cli.generate.check_model_options", lambda *names: None)
    monkeypatch.setattr("clearhead.cli.generate.load_model", lambda *names: pytest.fail("loaded"))
    done = clearhead("chat", "any", "--load", tmp_path / "talk.json")
    assert done.returncode == 1
    assert "talk.json is not" in done.stderr


def test_chat_continues_a_file(clearhead, tmp_path, monkeypatch):  # noqa: F811
    path = tmp_path / "talk.json"
    first = chat_model().chat("Be kind.")
    first.say("Hello", max_new_tokens=4)
    first.save(path)
    monkeypatch.setattr("clearhead.cli.generate.check_model_options", lambda *names: None)
    monkeypatch.setattr("clearhead.cli.generate.load_model", lambda *names: chat_model())
    options = ("--load", path, "--system", "Be rude.", "--max-new-tokens", 4)
    assert clearhead("chat", "any", *options, stdin="Why?\n/save\n").returncode == 0
    messages = json.loads(path.read_text())["messages"]
    assert messages[0] == {"role": "system", "content": "Be rude."}
    assert messages[1:3] == first.messages[1:]
    assert [message["role"] for message in messages[3:]] == ["user", "assistant"]


def test_history_shows_messages_unchanged(typed):
    """Console markup and emoji names are plain text, and a long line is not wrapped."""
    long = "10:100:1 [bold]now[/bold]" + " and then" * 20
    _, _, err = typed(long, "/history")
    assert f"user: {long}\n" in err


def test_an_invalid_option_does_not_end_the_chat(typed):
    chat, _, err = typed("Hello", "Again", top_p=0)
    assert err.count("error: top_p is 0") == 2
    assert chat.messages == []


def test_ctrl_c_stops_an_answer_and_keeps_its_text(typed, monkeypatch):
    chat = chat_model().chat()
    start_decoding = chat.text_generator.start_decoding

    def interrupted(text_generator, *arguments):
        for number, step in enumerate(start_decoding(*arguments)):
            if number == 3:
                raise KeyboardInterrupt
            yield step

    monkeypatch.setattr(type(chat.text_generator), "start_decoding", interrupted)
    _, out, err = typed("Hello", "/history", chat=chat, max_new_tokens=30)
    assert chat.messages[-1]["role"] == "assistant"
    assert out == chat.messages[-1]["content"] + "\n"
    assert "assistant: " in err
    monkeypatch.undo()
    messages = [*chat.messages, {"role": "user", "content": "Go on"}]
    fresh = chat_model()
    ids = fresh.tokenizer.encode(render_chat(fresh.tokenizer, messages), add_special_tokens=False)
    assert chat.say("Go on", max_new_tokens=6) == fresh.generate(ids, max_new_tokens=6).text


def test_ctrl_c_before_the_first_token_leaves_the_conversation_as_it_was(typed, monkeypatch):
    chat = chat_model().chat()
    chat.say("Hello", max_new_tokens=4)
    before = list(chat.messages)

    def interrupted(text_generator, *arguments):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(type(chat.text_generator), "start_decoding", interrupted)
    _, out, err = typed("Why?", chat=chat)
    assert chat.messages == before
    assert out == "\n"
    assert err == "Stopped before the first token; the conversation is as it was before.\n"


def test_a_conversation_past_the_context_is_reported(typed):
    _, _, err = typed("Hello", "Why?", chat=chat_model(context=24).chat())
    assert "is longer than the model's context of 24 tokens; /reset starts a new one" in err.replace("\n", " ")
