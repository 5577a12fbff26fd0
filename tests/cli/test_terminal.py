"""The chat in a terminal: commands, Ctrl-C, and what is printed to stdout and stderr."""

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest

from clearhead.api import Model
from clearhead.cli.terminal import run_chat
from clearhead.tokenization.chat_template import render_chat
from tests.api.test_chat import TemplateTokenizer, chat_model
from tests.checkpoint.tiny import tiny_network


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


def test_history_reset_help_and_an_unknown_command(typed):
    chat, out, err = typed("Hello", "/history", "/reset", "/history", "/help", "/dance")
    assert chat.messages == []
    assert err.count("user: Hello") == 1
    assert "unknown command /dance; /reset starts a new conversation" in err.replace("\n", " ")
    assert err.count("/quit ends the chat") == 2
    assert out.count("\n") >= 1


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
    assert f"assistant: {chat.messages[-1]['content']}" in err
    monkeypatch.undo()
    messages = [*chat.messages, {"role": "user", "content": "Go on"}]
    fresh = chat_model()
    ids = fresh.tokenizer.encode(render_chat(fresh.tokenizer, messages), add_special_tokens=False)
    assert chat.say("Go on", max_new_tokens=6) == fresh.generate(ids, max_new_tokens=6).text


def test_a_conversation_past_the_context_is_reported(typed):
    _, _, err = typed("Hello", "Why?", chat=chat_model(context=24).chat())
    assert "is longer than the model's context of 24 tokens; /reset starts a new one" in err.replace("\n", " ")


# --- a real terminal


def read_until(screen, wanted, seconds=60):
    """Return the output of a terminal up to and including `wanted`."""
    output, end = "", time.monotonic() + seconds
    while wanted not in output:
        ready, _, _ = select.select([screen], [], [], max(end - time.monotonic(), 0))
        try:
            more = os.read(screen, 4096) if ready else b""
        except OSError:  # the process has closed the terminal
            more = b""
        assert more, f"{wanted!r} did not appear; the terminal shows {output!r}"
        output += more.decode(errors="replace")
    return output


ENDLESS = ("--max-new-tokens", "1000000", "--min-new-tokens", "1000000")


def restore_interrupts():
    """Handle SIGINT again; children of a shell in the background ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_a_chat_in_a_pseudo_terminal(tmp_path):
    """Line editing, Ctrl-C during an answer, then the history, then Ctrl-D."""
    tokenizer = TemplateTokenizer()
    folder = Model(tiny_network(vocab_size=tokenizer.vocab_size), tokenizer).save(tmp_path / "tiny")
    (folder / "chat_template.jinja").write_text(tokenizer.chat_template)
    screen, terminal = pty.openpty()
    command = [sys.executable, "-m", "clearhead", "chat", str(folder), *ENDLESS]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "200"}
    ends = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
    with subprocess.Popen(command, **ends, env=environment, preexec_fn=restore_interrupts) as process:
        os.close(terminal)
        try:
            read_until(screen, "> ")
            os.write(screen, b"Hellx\x7fo\n")  # backspace
            time.sleep(1.0)
            process.send_signal(signal.SIGINT)
            read_until(screen, "per second")
            os.write(screen, b"/history\n")
            assert "user: Hello" in read_until(screen, "assistant:")
            os.write(screen, b"\x1b[A")  # arrow up: the previous line
            assert "/history" in read_until(screen, "/history")
            os.write(screen, b"\x15\x04")
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()
            os.close(screen)
