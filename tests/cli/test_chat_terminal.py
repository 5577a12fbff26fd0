"""`clearhead chat` in a pseudo-terminal: editing, pasting, wrapping, Ctrl-C, Ctrl-D, resizing, progress."""

import json
import re
import sys

import pytest
from rich.cells import cell_len

from tests.api.test_chat import chat_model
from tests.cli.screen import Screen

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")

PASTED = "first line\n\n  second line\nthird line"


@pytest.fixture
def scripted(tmp_path):
    """Start a chat with given answers; `messages` of the result are known after it has ended."""

    def start(answer, seconds=0.0, columns=80, **options):
        file = tmp_path / "messages.json"
        command = [sys.executable, "-m", "tests.cli.scripted_chat", answer, str(seconds), str(file)]
        screen = Screen(command, columns=columns, **options)
        screen.messages = lambda: json.loads(file.read_text())
        screen.wait_for_prompt()
        return screen

    return start


def quit_chat(screen):
    """Press Ctrl-D and return what the user sent."""
    screen.wait_for_prompt()
    screen.type("\x04")
    assert screen.wait_for_end() == 0
    return [message["content"].rstrip() for message in screen.messages() if message["role"] == "user"]


def test_editing_pasting_and_the_history(scripted):
    with scripted("echo") as screen:
        screen.type("Hellx\x7fo")  # backspace
        screen.type("\x1b[D\x1b[DL\r")  # two times to the left
        screen.wait_for("\nHelLlo\n")
        screen.wait_for_prompt()
        assert screen.has_bracketed_paste
        screen.paste(PASTED)
        screen.wait_for("> first line\n\n    second line\n  third line")
        screen.type("\r")
        screen.wait_for("  second line\nthird line\n")
        screen.wait_for_prompt()
        screen.type("one\x1b\rtwo\r")  # Alt-Enter
        screen.wait_for("one\ntwo\n")
        screen.wait_for_prompt()
        screen.type("\x1b[A")  # arrow up: the message before
        screen.wait_for(lambda screen: screen.text.endswith("> one\n  two"))
        screen.type("\x03")  # Ctrl-C gives up the line
        screen.wait_for("/quit or Ctrl-D ends the chat.")
        screen.wait_for_prompt()
        screen.type("/he\t")  # Tab completes
        screen.wait_for("> /help")
        screen.type("\r")
        screen.wait_for("/set [NAME VALUE]")
        screen.wait_for_prompt()
        screen.type("/set temp\t 0.5\r")
        screen.wait_for("\ntemperature 0.5\n")
        assert quit_chat(screen) == ["HelLlo", PASTED, "one\ntwo"]


ANSWER = (
    "The Transformer replaces recurrence by attention, and it reads all words at once. "
    "Donaudampfschifffahrtsgesellschaftskapitänsmütze is one word. 日本語の文章は空白なしで書かれていますから、"
    "行はどこでも折り返せます。 Emoji 👍🏽 👩\u200d👩\u200d👧 🇫🇷 count double. \x1b[2J\x1b]0;owned\x07 are shown.\n\n"
    "    indented code stays\nend"
)


@pytest.mark.parametrize("columns", [40, 73])
def test_answers_wrap_whole_words_and_contain_no_escape_sequences(scripted, columns):
    with scripted(ANSWER, columns=columns) as screen:
        screen.type("Hi\r")
        screen.wait_for("per second")
        text = screen.text
        shown = text[text.index("> Hi\n") + 5 : text.index("\nend\n") + 4].split("\n")
        printed = screen.output.decode()
        quit_chat(screen)
    assert max(map(cell_len, shown)) < columns
    assert max(map(cell_len, shown)) > columns - 20
    words = re.findall(r"[A-Za-z,.]+|\\x\w\w", ANSWER.replace("\x1b", "\\x1b").replace("\x07", "\\x07"))
    for word in words:
        assert len(word) >= columns or any(word in line for line in shown), word
    assert "    indented code stays" in shown
    assert not any(line.startswith(("。", "、")) for line in shown)
    assert "\\x1b[2J\\x1b]0;owned\\x07" in "".join(shown).replace(" ", "")
    assert "\x1b[2J" not in printed
    assert "\x1b]0;" not in printed


def test_ctrl_c_stops_an_answer_and_keeps_its_text(scripted):
    with scripted("echo", seconds=0.02) as screen:
        screen.type("word " * 100 + "\r")
        screen.wait_for("\nword word word")
        screen.interrupt()
        screen.wait_for("per second")
        screen.wait_for_prompt()
        assert "^C" not in screen.text
        screen.type("again\r")
        screen.wait_for("\nagain\n")
        first, second = quit_chat(screen)
        assert second == "again"
        answer = screen.messages()[1]["content"]
        assert answer.startswith("word word word")
        assert len(answer) < len(first)


def test_keys_during_an_answer_wait_for_the_next_message(scripted):
    with scripted("echo", seconds=0.02) as screen:
        screen.type("word " * 20 + "\r")
        screen.wait_for("\nword word")
        screen.paste("two\nlines")
        screen.wait_for("per second")
        assert "two" not in screen.text[: screen.text.index("per second")]
        screen.wait_for("> two\n  lines")  # still one message, which can be edited
        screen.type("!\r")
        screen.wait_for("\ntwo\nlines!\n")
        assert quit_chat(screen)[1] == "two\nlines!"


def test_a_narrower_window_wraps_the_rest_of_the_answer(scripted):
    with scripted("word " * 60, seconds=0.01) as screen:
        screen.type("Hi\r")
        screen.wait_for(lambda screen: screen.text.count("word") > 10)
        screen.resize(30, 44)
        screen.wait_for("per second")
        widths = [len(line) for line in screen.lines if re.fullmatch(r"word( word)*", line)]
        quit_chat(screen)
    assert widths[-2] == len("word " * 8) - 1  # 39 of 44 columns, for all lines after the present one


def test_a_dumb_terminal_gets_no_escape_sequences(scripted):
    with scripted("echo", environment={"TERM": "dumb"}) as screen:
        screen.type("Hello\r")
        screen.wait_for("per second")
        assert quit_chat(screen) == ["Hello"]
        assert b"\x1b" not in screen.output


def test_a_model_loads_with_a_progress_bar_and_answers(tmp_path):
    """The installed command, from loading to Ctrl-D, with a real (tiny) model and an answer without an end."""
    model = chat_model(context=100_000)
    folder = model.save(tmp_path / "tiny")
    (folder / "chat_template.jinja").write_text(model.tokenizer.chat_template)
    endless = ("--max-new-tokens", "1000000", "--min-new-tokens", "1000000")
    with Screen([sys.executable, "-m", "clearhead", "chat", str(folder), *endless], columns=200) as screen:
        screen.wait_for("loading ")
        screen.wait_for_prompt()
        assert "loading" not in screen.text  # the bar has gone
        screen.type("Hello\r")
        screen.wait_for(lambda screen: len(screen.text) > 1000)
        screen.interrupt()
        screen.wait_for("tokens in the cache")
        screen.wait_for_prompt()
        screen.type("/set max_new_tokens 5\r")
        screen.wait_for("error: min_new_tokens is 1000000; it must not exceed max_new_tokens, 5")
        screen.wait_for_prompt()
        screen.type("/set min_new_tokens 0\r")
        screen.wait_for("min_new_tokens 0")
        screen.wait_for_prompt()
        screen.type("/set max_new_tokens 5\r")
        screen.wait_for_prompt()
        screen.type("And now?\r")
        screen.wait_for("\n5 tokens, ")
        screen.wait_for_prompt()
        screen.type("\x04")
        assert screen.wait_for_end() == 0


def test_answers_can_be_piped_while_the_prompt_stays_on_the_terminal(tmp_path):
    """As in: clearhead chat smollm2 | tee answers.txt"""
    script = f"{sys.executable} -m tests.cli.scripted_chat $'\\x1b[1mbold' 0 > {tmp_path / 'answers'}"
    with Screen(["bash", "-c", script]) as screen:
        screen.wait_for_prompt()
        screen.type("Hi\r")
        screen.wait_for("per second")
        screen.wait_for_prompt()
        screen.type("\x04")
        assert screen.wait_for_end() == 0
    assert (tmp_path / "answers").read_text() == "\x1b[1mbold\n"
