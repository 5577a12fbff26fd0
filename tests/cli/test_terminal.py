"""The chat as somebody at a terminal meets it: commands, Ctrl-C, and what goes to which stream."""

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
from clearhead.cli.terminal import talk
from clearhead.tokenization.chat import render_chat
from tests.checkpoint.tiny import tiny_network
from tests.test_chat import Templated, model


@pytest.fixture
def typed(monkeypatch, capsys):
    """What a chat answers to these lines: (chat, stdout, stderr)."""

    def run(*lines, chat=None, **options):
        chat = chat or model().chat()
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        talk(chat, {"max_new_tokens": 8} | options)
        return chat, *capsys.readouterr()

    return run


def test_answers_go_to_stdout_and_their_speed_to_stderr(typed):
    chat, out, err = typed("Hello", "", "Why?", chat=model(context=128).chat())
    assert [message["role"] for message in chat.messages] == ["user", "assistant"] * 2
    assert out == "".join(f"{message['content']}\n" for message in chat.messages[1::2])
    assert len(re.findall(r"^8 tokens, [\d.]+ per second; \d+ read, \d+ cached; cut off at", err, re.MULTILINE)) == 2


def test_the_end_of_the_input_and_quit_leave(typed):
    for word in ("/quit", "/exit"):
        chat, out, _ = typed(word, "Hello")
        assert (chat.messages, out) == ([], "")


def test_history_reset_help_and_unknown_commands(typed):
    chat, out, err = typed("Hello", "/history", "/reset", "/history", "/help", "/dance")
    assert chat.messages == []
    assert err.count("user: Hello") == 1
    assert "there is no command /dance; /reset starts anew" in err.replace("\n", " ")
    assert err.count("/quit leaves") == 2
    assert out.count("\n") >= 1


def test_history_shows_what_was_typed(typed):
    """Console markup and names of emoji are words like others, and a long line stays one."""
    long = "10:100:1 [bold]now[/bold]" + " and then" * 20
    _, _, err = typed(long, "/history")
    assert f"user: {long}\n" in err


def test_a_wrong_option_does_not_end_the_chat(typed):
    chat, _, err = typed("Hello", "Again", top_p=0)
    assert err.count("error: top_p is 0") == 2
    assert chat.messages == []


def test_ctrl_c_stops_an_answer_and_keeps_what_was_said(typed, monkeypatch):
    chat = model().chat()
    answers = chat.text_generator.turns

    def interrupted(text_generator, *given):
        for number, turn in enumerate(answers(*given)):
            if number == 3:
                raise KeyboardInterrupt
            yield turn

    monkeypatch.setattr(type(chat.text_generator), "turns", interrupted)
    _, out, err = typed("Hello", "/history", chat=chat, max_new_tokens=30)
    assert chat.messages[-1]["role"] == "assistant"
    assert out == chat.messages[-1]["content"] + "\n"
    assert f"assistant: {chat.messages[-1]['content']}" in err
    monkeypatch.undo()
    messages = [*chat.messages, {"role": "user", "content": "Go on"}]
    fresh = model()
    ids = fresh.tokenizer.encode(render_chat(fresh.tokenizer, messages), add_special_tokens=False)
    assert chat.say("Go on", max_new_tokens=6) == fresh.generate(ids, max_new_tokens=6).text


def test_beyond_the_context_it_says_so(typed):
    _, _, err = typed("Hello", "Why?", chat=model(context=24).chat())
    assert "has passed the 24 tokens this model was made for; /reset starts anew" in err.replace("\n", " ")


# --- a real one


def read_until(screen, wanted, seconds=60):
    """What a terminal shows until it shows this."""
    shown, end = "", time.monotonic() + seconds
    while wanted not in shown:
        ready, _, _ = select.select([screen], [], [], max(end - time.monotonic(), 0))
        try:
            more = os.read(screen, 4096) if ready else b""
        except OSError:  # the other end is closed
            more = b""
        assert more, f"{wanted!r} did not come; the terminal shows {shown!r}"
        shown += more.decode(errors="replace")
    return shown


ENDLESS = ("--max-new-tokens", "1000000", "--min-new-tokens", "1000000")


def hear_interrupts():
    """A shell in the background has its children ignore them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_at_a_real_terminal(tmp_path):
    """Line editing, Ctrl-C in the middle of an answer, then another answer, then Ctrl-D."""
    tokenizer = Templated()
    folder = Model(tiny_network(vocab_size=tokenizer.vocab_size), tokenizer).save(tmp_path / "tiny")
    (folder / "chat_template.jinja").write_text(tokenizer.chat_template)
    screen, terminal = pty.openpty()
    command = [sys.executable, "-m", "clearhead", "chat", str(folder), *ENDLESS]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "200"}
    ends = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
    with subprocess.Popen(command, **ends, env=environment, preexec_fn=hear_interrupts) as process:
        os.close(terminal)
        try:
            read_until(screen, "> ")
            os.write(screen, b"Hellx\x7fo\n")  # a letter taken back
            time.sleep(1.0)
            process.send_signal(signal.SIGINT)
            read_until(screen, "per second")
            os.write(screen, b"/history\n")
            assert "user: Hello" in read_until(screen, "assistant:")
            os.write(screen, b"\x1b[A")  # the line before, by arrow
            assert "/history" in read_until(screen, "/history")
            os.write(screen, b"\x15\x04")
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()
            os.close(screen)
