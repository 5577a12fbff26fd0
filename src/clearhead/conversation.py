"""A chat that keeps its cache between turns: only what is new goes through the network (book E2).

    chat = model.chat(system="Answer briefly."); print(chat.say("What is a Transformer?"))

Each turn the whole conversation is rendered by the model's template; as far as its tokens are those in the cache, the
cache stands, and the rest is read after it.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from clearhead.cache.cache import KeyValueCache
from clearhead.errors import ClearheadError
from clearhead.generation.decode import decode
from clearhead.generation.transcript import Transcript
from clearhead.tokenization.chat import render_chat

if TYPE_CHECKING:
    from clearhead.bundle import Model


class Chat:
    def __init__(self, model: "Model", system: str | None = None):
        if model.config.decoder is None or model.config.is_encoder_decoder:
            raise ClearheadError("only a decoder alone chats; use model.generate")
        self.model, self.system = model, system
        self.tokenizer = model.need_tokenizer()
        self.reset()

    def reset(self) -> None:
        """Forget the conversation."""
        self.messages: list[dict[str, str]] = []
        if self.system is not None:
            self.messages.append({"role": "system", "content": self.system})
        self.forget_tokens()

    def forget_tokens(self) -> None:
        self.cache = KeyValueCache(self.model.config)
        self.held: list[int] = []  # the tokens in the cache
        self.num_read, self.num_made = 0, 0  # tokens of the last turn

    def say(self, text: str, **options: Any) -> str:
        return "".join(self.stream(text, **options))

    def stream(self, text: str, **options: Any) -> Iterator[str]:
        """The answer in pieces. Whoever stops listening keeps what was said so far as the answer."""
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self.tokenizer.encode(render_chat(self.tokenizer, messages), add_special_tokens=False)
        (row,) = self.model.rows(ids, 1, options)
        kept = self.rewind(ids)
        row = replace(row, prompt=ids[kept:], earlier=ids[:kept])
        self.messages = messages  # from here on the turn counts, whatever becomes of the answer
        self.num_read = len(row.prompt)
        transcript = Transcript(self.tokenizer, row)
        try:
            for _ in decode(self.model.network, [row], cache=self.cache):
                yield transcript.read()
        finally:
            # The last token was chosen but has not gone through the network.
            self.held, self.num_made = [*ids, *row.tokens][: self.cache.length], len(row.tokens)
            self.messages.append({"role": "assistant", "content": transcript.text})

    def rewind(self, ids: list[int]) -> int:
        """Cut the cache to what it shares with `ids`, and leave at least one token to read; how many stand."""
        shared = 0
        while shared < min(len(self.held), len(ids) - 1) and self.held[shared] == ids[shared]:
            shared += 1
        try:
            self.cache.truncate(shared)
        except ClearheadError:  # a window has moved on: read the conversation again
            self.forget_tokens()
            return 0
        self.held = self.held[:shared]
        return shared
