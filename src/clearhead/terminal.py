"""The chat in a terminal: lines in, an answer streamed out, and how fast it came.

    talk(model.chat(), {"max_new_tokens": 256})

Answers go to stdout, all else to stderr, so that a transcript can be piped.
"""

import sys
import time
from typing import Any

from rich.console import Console

from clearhead.conversation import Chat
from clearhead.errors import ClearheadError

HELP = "/reset starts anew, /history shows the conversation, /help this; Ctrl-C stops an answer, Ctrl-D leaves."


def talk(chat: Chat, options: dict[str, Any]) -> None:
    messages = Console(stderr=True, highlight=False)
    if sys.stdin.isatty():
        messages.print(HELP, style="dim")
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            messages.print()
            continue
        match line:
            case "":
                continue
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
        for piece in chat.stream(line, **options):
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        pass  # what was said so far stays in the conversation
    except ClearheadError as error:
        messages.print(f"error: {error}", markup=False)
        return
    finally:
        sys.stdout.write("\n")
    seconds = time.perf_counter() - started
    speed = f"{chat.num_made} tokens, {chat.num_made / seconds:.1f} per second"
    messages.print(f"{speed}; {chat.num_read} read, {chat.cache.length} in the cache", style="dim")
