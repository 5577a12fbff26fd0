"""A chat that keeps its cache between turns: only what is new goes through the network (book E2).

    chat = model.chat(system="Answer briefly."); print(chat.say("What is a Transformer?"))

Each turn the whole conversation is rendered by the model's template; as far as its tokens are those in the cache, the
cache stands, and the rest is read after it.
"""

from collections.abc import Generator
from typing import Any

from clearhead.cache import KeyValueCache
from clearhead.errors import ClearheadError
from clearhead.generation import OTHERS, Generation, TextGenerator, TokenSequence, Transcript, check, require_tokenizer
from clearhead.tokenization import render_chat


class Chat:
    """`messages` is the conversation so far, `last` the last answer with its tokens and what ended it."""

    def __init__(self, text_generator: TextGenerator, system: str | None = None):
        config = text_generator.network.config
        if config.decoder is None or config.is_encoder_decoder:
            raise ClearheadError("only a decoder alone chats; this model has an encoder")
        if system is not None:
            check_text(system)
        self.text_generator, self.system = text_generator, system
        self.tokenizer = require_tokenizer(text_generator.tokenizer)
        if self.tokenizer.chat_template is None:
            raise ClearheadError("this model has no chat template: it was not taught to chat, but can generate")
        self.speaking: Generator[str, None, None] | None = None
        self.reset()

    def reset(self) -> None:
        """Forget the conversation."""
        self.hush()
        self.messages: list[dict[str, str]] = []
        if self.system is not None:
            self.messages.append({"role": "system", "content": self.system})
        self.last: Generation | None = None
        self.forget_tokens()

    def forget_tokens(self) -> None:
        self.cache = KeyValueCache(self.text_generator.network.config)
        self.held: list[int] = []  # the tokens in the cache
        self.num_read = 0  # tokens of the last turn that were not in it

    def hush(self) -> None:
        """End the answer that is still being given: it must not come back later, into another conversation."""
        if self.speaking is not None:
            self.speaking.close()

    def say(self, text: str, **options: Any) -> str:
        return "".join(self.stream(text, **options))

    def stream(self, text: str, **options: Any) -> Generator[str, None, None]:
        """The answer in pieces. Whoever stops listening keeps what was said so far as the answer, if anything was.

        So does whoever asks again before an answer has come to its end.
        """
        check_text(text)
        separate = next((name for name in OTHERS if name in options), None)
        if separate is not None:
            raise ClearheadError(f"a chat takes no {separate}; generate_many does")
        self.hush()
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self.tokenizer.encode(render_chat(self.tokenizer, messages), add_special_tokens=False)
        (row,) = self.text_generator.rows(ids, 1, options)
        check([row], self.text_generator.network)
        self.speaking = self.answer(messages, row)
        return self.speaking

    def answer(self, messages: list[dict[str, str]], whole: TokenSequence) -> Generator[str, None, None]:
        kept = self.rewind(ids := list(whole.prompt))
        row = TokenSequence(ids[kept:], whole.options, earlier=ids[:kept])
        self.num_read = len(row.prompt)
        transcript = Transcript(self.tokenizer, row)
        try:
            for _ in self.text_generator.turns([row], self.cache):
                yield transcript.read()
        finally:
            # The last token was chosen but has not gone through the network.
            self.held = [*ids, *row.tokens][: self.cache.length]
            self.last = Generation.of(transcript, self.text_generator.network.config)
            if row.tokens:
                self.messages = [*messages, {"role": "assistant", "content": transcript.text}]

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


def check_text(message: object) -> None:
    if not isinstance(message, str):
        raise ClearheadError(f"the message is {message!r}; it must be a text")
