"""The chat in a terminal: lines in, an answer streamed out, and how fast it came.

    talk(model.chat(), {"max_new_tokens": 256})

Answers go to stdout, all else to stderr, so that a transcript can be piped.
"""

import sys
import time
from contextlib import closing, suppress
from typing import Any

from rich.console import Console

from clearhead.api import Chat
from clearhead.errors import ClearheadError

HELP = "/reset starts anew, /history shows the conversation, /quit leaves, /help shows this; Ctrl-C stops an answer."


def talk(chat: Chat, options: dict[str, Any]) -> None:
    """Until /quit or the end of the input (Ctrl-D)."""
    messages = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)
    prompt = ""
    if sys.stdin.isatty():
        with suppress(ImportError):  # Windows has no readline, and edits lines by itself
            import readline  # noqa: F401  (its import gives input() arrows and a history)
        messages.print(HELP, style="dim")
        prompt = "> " if sys.stdout.isatty() else ""
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            messages.print("\n/quit or Ctrl-D leaves", style="dim")
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
                    messages.print(f"{message['role']}: {message['content']}", markup=False)
            case "/help":
                messages.print(HELP, style="dim")
            case _ if line.startswith("/"):
                messages.print(f"there is no command {line}; {HELP}", style="dim", markup=False)
            case _:
                answer(chat, line, options, messages)


def answer(chat: Chat, line: str, options: dict[str, Any], messages: Console) -> None:
    started = time.perf_counter()
    try:
        with closing(chat.stream(line, **options)) as pieces:
            for piece in pieces:
                sys.stdout.write(piece)
                sys.stdout.flush()
    except KeyboardInterrupt:
        pass  # what was said so far stays in the conversation
    except ClearheadError as error:
        messages.print(f"error: {error}", markup=False)
        return
    finally:
        sys.stdout.write("\n")
        sys.stdout.flush()
    if chat.last is not None:
        messages.print(told(chat, time.perf_counter() - started), style="dim")


def told(chat: Chat, seconds: float) -> str:
    assert chat.last is not None
    num_made, context = len(chat.last.tokens), chat.text_generator.network.config.context
    words = f"{num_made} tokens, {num_made / seconds:.1f} per second; {chat.num_read} read, {chat.cache.length} cached"
    if chat.last.num_past_context:
        words += f"\nThe conversation has passed the {context:,} tokens this model was made for; /reset starts anew."
    elif chat.last.finish_reason == "context":
        words += f"\nThe conversation has reached the model's {context:,} tokens; /reset starts anew."
    elif chat.last.finish_reason == "length":
        words += "; cut off at --max-new-tokens"
    return words
