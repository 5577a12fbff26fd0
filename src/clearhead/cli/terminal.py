"""The chat in a terminal: read lines, stream the answers and report their speed.

    run_chat(model.chat(), {"max_new_tokens": 256})

Answers go to stdout and everything else to stderr, so that the answers can be piped.
"""

import sys
import time
from contextlib import closing, suppress
from typing import Any

from rich.console import Console

from clearhead.api import Chat
from clearhead.errors import ClearheadError

_HELP = (
    "/reset starts a new conversation, /history shows the conversation, /quit ends the chat, /help shows this line; "
    "Ctrl-C stops an answer."
)


def run_chat(chat: Chat, options: dict[str, Any]) -> None:
    """Answer lines from stdin until /quit or the end of the input (Ctrl-D)."""
    console = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)
    prompt = ""
    if sys.stdin.isatty():
        with suppress(ImportError):  # Windows has no readline; its terminal edits lines itself
            import readline  # noqa: F401  (importing it gives input() line editing and a history)
        console.print(_HELP, style="dim")
        prompt = "> " if sys.stdout.isatty() else ""
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            console.print("\n/quit or Ctrl-D ends the chat", style="dim")
            continue
        match line:
            case "":
                continue
            case "/quit" | "/exit":
                return
            case "/reset":
                chat.reset()
            case "/history":
                for message in chat.messages:
                    console.print(f"{message['role']}: {message['content']}", markup=False)
            case "/help":
                console.print(_HELP, style="dim")
            case _ if line.startswith("/"):
                console.print(f"unknown command {line}; {_HELP}", style="dim", markup=False)
            case _:
                _print_answer(chat, line, options, console)


def _print_answer(chat: Chat, line: str, options: dict[str, Any], console: Console) -> None:
    """Stream the answer to stdout and print its statistics, or an error, to stderr."""
    started = time.perf_counter()
    try:
        with closing(chat.stream(line, **options)) as pieces:
            for piece in pieces:
                sys.stdout.write(piece)
                sys.stdout.flush()
    except KeyboardInterrupt:
        pass  # the text so far stays in the conversation
    except ClearheadError as error:
        console.print(f"error: {error}", markup=False)
        return
    finally:
        sys.stdout.write("\n")
        sys.stdout.flush()
    if chat.last_generation is not None:
        console.print(_describe_answer(chat, time.perf_counter() - started), style="dim")


def _describe_answer(chat: Chat, elapsed_seconds: float) -> str:
    """Return one line on the speed and the cache, and a second one if the context is full."""
    generation, context = chat.last_generation, chat.text_generator.network.config.context
    assert generation is not None
    num_tokens = len(generation.tokens)
    text = (
        f"{num_tokens} tokens, {num_tokens / elapsed_seconds:.1f} per second; "
        f"{chat.num_prompt_tokens} prompt tokens read, {chat.cache.length} tokens in the cache"
    )
    if generation.num_past_context:
        text += f"\nThe conversation is longer than the model's context of {context:,} tokens; /reset starts a new one."
    elif generation.finish_reason == "context":
        text += f"\nThe model's context of {context:,} tokens is full; /reset starts a new conversation."
    elif generation.finish_reason == "length":
        text += "; cut off at --max-new-tokens"
    return text
