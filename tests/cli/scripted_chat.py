"""Run the loop of `clearhead chat` with given answers: the tests of the terminal need known texts, and no torch.

python -m tests.cli.scripted_chat ANSWER SECONDS_PER_CHARACTER [FILE]

The answer "echo" repeats the user's message. With FILE, the messages are written there at the end.
"""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from clearhead.cli.chat_commands import run_chat


class ScriptedChat:
    """What the loop uses of clearhead.api.Chat. The answers come character by character."""

    def __init__(self, answer, seconds):
        self.answer, self.seconds = answer, seconds
        self.messages = []
        self.system = None
        self.last_generation = None
        self.num_prompt_tokens = 0
        self.cache = SimpleNamespace(length=0, num_bytes=0)
        self.text_generator = SimpleNamespace(network=SimpleNamespace(config=SimpleNamespace(context=100)))

    def stream(self, text, **options):
        answer, shown = text if self.answer == "echo" else self.answer, ""
        try:
            for char in answer:
                time.sleep(self.seconds)
                shown += char
                yield char
        finally:
            self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": shown}]
            self.last_generation = SimpleNamespace(tokens=list(shown), num_past_context=0, finish_reason="stop")


def main(answer, seconds, path=None):
    chat = ScriptedChat(answer, float(seconds))
    run_chat(chat, {"temperature": 0.7})
    assert "torch" not in sys.modules
    if path is not None:
        Path(path).write_text(json.dumps(chat.messages))


if __name__ == "__main__":
    main(*sys.argv[1:])
