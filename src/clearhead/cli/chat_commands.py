"""The loop of `clearhead chat` and its commands, which begin with a slash: /undo, /save talk.json, /set top_p 0.9.

run_chat(model.chat(), {"max_new_tokens": 256})
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.cli.app import print_message
from clearhead.cli.chat_input import PATHS, open_reader
from clearhead.cli.chat_session import ChatSession
from clearhead.cli.chat_settings import OFF, change_option, describe_option, describe_options, find_option
from clearhead.cli.sampling import OPTIONS
from clearhead.errors import ClearheadError, unknown_name
from clearhead.home import expand_user

if TYPE_CHECKING:
    from clearhead.api import Chat

_GREETING = "Alt-Enter starts a new line, Ctrl-C stops an answer, Ctrl-D quits; /help lists the commands."
_OVERWRITE = "--overwrite"


class _QuitChat(Exception):  # noqa: N818  (not an error)
    """The user wants to end the chat."""


@dataclass(frozen=True)
class _Command:
    action: Callable[[ChatSession, str], None]
    about: str
    argument: str = ""  # how it is written in the help; empty if the command takes none
    completions: tuple[str, ...] = ()


def run_chat(chat: "Chat", options: dict[str, Any], file: Path | None = None) -> None:
    """Answer messages from stdin until /quit or the end of the input (Ctrl-D).

    file: where the conversation comes from, if it was loaded; /save then writes there.
    """
    session = ChatSession(chat, dict(options), file=file)
    reader = open_reader({name: command.completions for name, command in _COMMANDS.items()})
    if reader.is_interactive:
        session.note(_GREETING)
    while True:
        try:
            line = reader.read()
            if _is_command(line):
                _run_command(session, line.strip())
            elif message := line.strip():
                session.answer(lambda **options: session.chat.stream(message, **options))
        except (EOFError, _QuitChat):
            return
        except KeyboardInterrupt:
            session.note("/quit or Ctrl-D ends the chat.")
        except ClearheadError as error:
            print_message("error", str(error))


def _is_command(line: str) -> bool:
    """Return whether a line is a command: a slash at its very start. Several pasted lines are always a message."""
    return line.startswith("/") and "\n" not in line.strip()


def _run_command(session: ChatSession, line: str) -> None:
    name, _, argument = line.partition(" ")
    name = _ALIASES.get(name.lower(), name.lower())
    if name not in _COMMANDS:
        error = unknown_name("command", name, _COMMANDS, "/help lists them")
        raise ClearheadError(f"{error}, and a space before the / sends the line as a message")
    command = _COMMANDS[name]
    if argument.strip() and not command.argument:
        raise ClearheadError(f"{name} is followed by {argument.strip()!r}; it takes no argument")
    command.action(session, argument.strip())


# --- the conversation


def _set_system(session: ChatSession, text: str) -> None:
    if text:
        session.chat.system = None if text.lower() == OFF else text
    system = session.chat.system
    session.note("There is no system message." if system is None else f"System message: {system}")


def _undo(session: ChatSession, argument: str) -> None:
    message = session.chat.undo()
    session.note(f"Removed: {_first_line(message)}")


def _regenerate(session: ChatSession, argument: str) -> None:
    has_answer = bool(session.chat.messages) and session.chat.messages[-1]["role"] == "assistant"
    if has_answer and not session.options.get("temperature"):
        session.note("At temperature 0 the answer is the same again; /set temperature 0.7 samples another one.")
    elif has_answer and session.options.get("seed") is not None:
        session.note("With a seed the answer is the same again; /set seed none samples another one.")
    session.answer(session.chat.stream_regenerated)


def _reset(session: ChatSession, argument: str) -> None:
    session.chat.reset()
    session.file = None
    session.note("New conversation.")


def _show_history(session: ChatSession, argument: str) -> None:
    if not session.chat.messages:
        session.note("The conversation is empty.")
    for message in session.chat.messages:
        session.console.print(f"{message['role']}: {message['content']}", markup=False)


def _first_line(text: str, max_length: int = 60) -> str:
    line = text.strip().split("\n")[0]
    return line if line == text.strip() and len(line) <= max_length else f"{line[:max_length]}…"


# --- files


def _save(session: ChatSession, argument: str) -> None:
    words = argument.split()
    overwrite = _OVERWRITE in words
    name = argument.replace(_OVERWRITE, "").strip() if overwrite else argument
    if not name and session.file is None:
        raise ClearheadError("/save needs a file; write /save talk.json")
    path = expand_user(name) if name else session.file
    assert path is not None
    is_own = session.file is not None and path.absolute() == session.file.absolute()
    if path.exists() and not overwrite and not is_own:
        raise ClearheadError(f"{path} already exists; /save {_OVERWRITE} {path} replaces it")
    session.chat.save(path)
    session.file = path
    session.note(f"Saved {_count_messages(session.chat)} to {path}; /load {path} continues the conversation.")


def _load(session: ChatSession, argument: str) -> None:
    if not argument:
        raise ClearheadError("/load needs a file that /save wrote; write /load talk.json")
    path = expand_user(argument)
    session.chat.load(path)
    session.file = path
    session.note(f"Loaded {_count_messages(session.chat)} from {path}; /history shows them.")
    if session.chat.messages and session.chat.messages[-1]["role"] == "user":
        session.note("The last message has no answer yet; /regenerate answers it.")


def _count_messages(chat: "Chat") -> str:
    return f"{len(chat.messages)} message{'s' * (len(chat.messages) != 1)}"


# --- options and statistics


def _set_option(session: ChatSession, argument: str) -> None:
    name, value = re.fullmatch(r"([^\s=]*)[\s=]?(.*)", argument, re.DOTALL).groups()  # type: ignore[union-attr]
    if not name:
        session.note("\n".join(describe_options(session.options)))
        return
    if value.strip():
        session.options = change_option(session.options, name, value)
    session.note(describe_option(session.options, find_option(name)))


def _show_stats(session: ChatSession, argument: str) -> None:
    chat, speeds = session.chat, session.speeds
    context = chat.text_generator.network.config.context
    share = f"{chat.cache.length:,} of {context:,} tokens of the context"
    session.note(f"conversation: {_count_messages(chat)}")
    session.note(f"cache: {share}, {chat.cache.num_bytes / 1e6:.1f} MB")
    if speeds:
        last, seconds = speeds[-1], sum(speed.elapsed_seconds for speed in speeds)
        num_tokens = sum(speed.num_tokens for speed in speeds)
        session.note(
            f"last answer: {last.num_tokens} tokens in {last.elapsed_seconds:.1f} s, {last.tokens_per_second:.1f} per "
            f"second; the first after {last.first_seconds:.2f} s and {last.num_prompt_tokens} prompt tokens"
        )
        rate = num_tokens / max(seconds, 1e-9)
        session.note(f"all {len(speeds)} answers: {num_tokens} tokens, {rate:.1f} per second")
    changed = [describe_option(session.options, name) for name in OPTIONS if name in session.options]
    session.note(f"options: {', '.join(changed) or 'all at their defaults'}")


def _show_help(session: ChatSession, argument: str) -> None:
    lines = [(f"{name} {command.argument}".strip(), command.about) for name, command in _COMMANDS.items()]
    width = max(len(usage) for usage, _ in lines)
    for usage, about in lines:
        session.note(f"{usage:<{width}}  {about}")
    session.note(_GREETING)


def _quit(session: ChatSession, argument: str) -> None:
    raise _QuitChat


_COMMANDS = {
    "/system": _Command(_set_system, "show or replace the system message; none removes it", "[TEXT]"),
    "/undo": _Command(_undo, "remove your last message and its answer"),
    "/regenerate": _Command(_regenerate, "answer your last message again"),
    "/reset": _Command(_reset, "start a new conversation with the same system message"),
    "/history": _Command(_show_history, "show the conversation"),
    "/save": _Command(_save, "write the conversation to a JSON file", "FILE", PATHS),
    "/load": _Command(_load, "continue the conversation in a file", "FILE", PATHS),
    "/set": _Command(_set_option, "show or change a sampling option", "[NAME VALUE]", tuple(OPTIONS)),
    "/stats": _Command(_show_stats, "show tokens, speed, cache and options"),
    "/help": _Command(_show_help, "show this list"),
    "/quit": _Command(_quit, "end the chat"),
}
_ALIASES = {"/exit": "/quit", "/bye": "/quit", "/clear": "/reset", "/retry": "/regenerate", "/?": "/help"}
