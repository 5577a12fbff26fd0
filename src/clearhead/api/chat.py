"""Chat: a conversation that keeps its cache between turns, so the network reads only new tokens (book E2).

    chat = model.chat(system="Answer briefly."); print(chat.say("What is a Transformer?"))

For each turn the model's chat template renders the whole conversation. The cache keeps the tokens that are the same
as before, and the network reads the rest. So the messages may be changed between turns in any way: `undo`,
`regenerate`, `load` and a new system message leave the cache as it is, and the next turn truncates it.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Unpack

from clearhead.cache import KeyValueCache
from clearhead.errors import ClearheadError
from clearhead.generation import Generation, TextGenerator, TextOutput, TokenSequence
from clearhead.home import expand_user
from clearhead.options import GENERATE_ARGUMENTS, SamplingKeywords, SamplingOptions, documents_options
from clearhead.tokenization import Tokenizer, read_conversation, render_chat, write_conversation


class Chat:
    """A conversation with a model.

    say and stream send a message and return its answer; undo and regenerate change the last turn; save and load keep
    the conversation in a file.

    messages: the conversation so far, a list of {"role": …, "content": …}.
    last_generation: the last answer with its tokens and finish reason; None before the first one.
    num_prompt_tokens: how many tokens of the last turn the network read because they were not in the cache.
    """

    def __init__(self, text_generator: TextGenerator, system: str | None = None):
        self.text_generator = text_generator
        self.tokenizer = require_chat_template(text_generator)
        self._answer: Generator[str, None, None] | None = None
        self.messages: list[dict[str, str]] = []
        self.last_generation: Generation | None = None
        self.num_prompt_tokens = 0
        self._clear_cache()
        self.system = system

    def __repr__(self) -> str:
        return f"Chat({len(self.messages)} messages, {self.cache.length} tokens in the cache)"

    def _repr_html_(self) -> str:
        cell = '<td style="text-align: left; white-space: pre-wrap">'
        rows = (f"<th>{escape(each['role'])}</th>{cell}{escape(each['content'])}</td>" for each in self.messages)
        return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table><small>{escape(repr(self))}</small>"

    # --- the conversation

    @property
    def system(self) -> str | None:
        """The system message: instructions for the whole conversation. Assigning it keeps the other messages."""
        return self.messages[0]["content"] if self._num_system_messages else None

    @system.setter
    def system(self, text: str | None) -> None:
        self._close_answer()
        messages = self.messages[self._num_system_messages :]
        if text is not None:
            check_message(text)
            messages = [{"role": "system", "content": text}, *messages]
            self._check_template(messages)
        self.messages = messages

    @property
    def _num_system_messages(self) -> int:
        return int(bool(self.messages) and self.messages[0]["role"] == "system")

    def reset(self) -> None:
        """Start a new conversation with the same system message."""
        self._close_answer()
        self._replace_messages(self.messages[: self._num_system_messages])
        self._clear_cache()

    def undo(self) -> str:
        """Remove the user's last message and its answer, and return that message."""
        self._close_answer()
        before, message = self._split_at_last_question("undo")
        self._replace_messages(before)
        return message["content"]

    def save(self, path: str | Path) -> None:
        """Write the messages to a JSON file that `load` reads and that training accepts as a line of chat data."""
        write_conversation(expand_user(path), self.messages)

    def load(self, path: str | Path) -> None:
        """Continue the conversation in a file that `save` wrote, in place of the present one."""
        messages = read_conversation(expand_user(path))
        self._close_answer()
        self._check_template(messages)
        self._replace_messages(messages)

    def _replace_messages(self, messages: list[dict[str, str]]) -> None:
        self.messages = messages
        self.last_generation = None
        self.num_prompt_tokens = 0

    def _split_at_last_question(self, purpose: str) -> tuple[list[dict[str, str]], dict[str, str]]:
        """Return the messages before the user's last one, and that one."""
        for index in reversed(range(len(self.messages))):
            if self.messages[index]["role"] == "user":
                return self.messages[:index], self.messages[index]
        raise ClearheadError(f"there is nothing to {purpose}; the conversation has no message of the user yet")

    def _check_template(self, messages: list[dict[str, str]]) -> None:
        """Raise ClearheadError if the chat template rejects messages: some have no system message, for example."""
        is_question = bool(messages) and messages[-1]["role"] == "user"
        encode_messages(self.tokenizer, messages if is_question else [*messages, {"role": "user", "content": "Hi"}])

    # --- answers

    @documents_options(SamplingOptions)
    def say(self, text: str, **options: Unpack[SamplingKeywords]) -> str:
        """Send a message and return the answer."""
        return "".join(self.stream(text, **options))

    @documents_options(SamplingOptions)
    def stream(self, text: str, **options: Unpack[SamplingKeywords]) -> Generator[str, None, None]:
        """Send a message and return a generator over the pieces of the answer.

        If the generator is closed early, or the next message is sent before its end, the text so far is the answer.
        """
        check_message(text)
        self._close_answer()
        return self._start_answer([*self.messages, {"role": "user", "content": text}], options)

    @documents_options(SamplingOptions)
    def regenerate(self, **options: Unpack[SamplingKeywords]) -> str:
        """Answer the user's last message again, in place of its answer, and return the new answer."""
        return "".join(self.stream_regenerated(**options))

    @documents_options(SamplingOptions)
    def stream_regenerated(self, **options: Unpack[SamplingKeywords]) -> Generator[str, None, None]:
        """Answer the user's last message again, and return a generator over the pieces of the new answer.

        The old answer stays in the conversation until the new one has its first token.
        """
        self._close_answer()
        before, message = self._split_at_last_question("regenerate")
        return self._start_answer([*before, message], options)

    def _start_answer(self, messages: list[dict[str, str]], options: SamplingKeywords) -> Generator[str, None, None]:
        """Return a generator over the pieces of the answer to messages, after checking the options."""
        argument = next((name for name in GENERATE_ARGUMENTS if name in options), None)
        if argument is not None:
            raise ClearheadError(f"chat does not support {argument}; generate_many does")
        ids = encode_messages(self.tokenizer, messages)
        (conversation,) = self.text_generator.create_sequences(ids, 1, options)
        num_cached = self._keep_shared_prefix(ids)
        sequence = TokenSequence(ids[num_cached:], conversation.options, cached_tokens=ids[:num_cached])
        steps = self.text_generator.start_decoding([sequence], self.cache)
        self.num_prompt_tokens = len(sequence.prompt)
        self._answer = self._generate_answer(messages, sequence, steps)
        return self._answer

    def _close_answer(self) -> None:
        """Stop an answer that is still being generated, so that it cannot continue in a later conversation."""
        if self._answer is not None:
            self._answer.close()

    def _clear_cache(self) -> None:
        self.cache = KeyValueCache(self.text_generator.network.config)
        self.cached_tokens: list[int] = []

    def _generate_answer(
        self, messages: list[dict[str, str]], sequence: TokenSequence, steps: Iterator[None]
    ) -> Generator[str, None, None]:
        output = TextOutput(self.tokenizer, sequence)
        try:
            yield from output.pieces(steps)
        except GeneratorExit:  # closed between two steps
            raise
        except BaseException:  # a step that was interrupted may have written keys and values without counting them
            self._clear_cache()
            raise
        finally:
            # The last token was chosen, but the network has not read it.
            self.cached_tokens = sequence.text[: self.cache.length]
            self.last_generation = Generation.from_output(output, self.text_generator.network.config)
            if sequence.tokens:
                self.messages = [*messages, {"role": "assistant", "content": output.text}]

    def _keep_shared_prefix(self, ids: list[int]) -> int:
        """Truncate the cache to the tokens it shares with `ids`, but not to all of `ids`; return their number.

        At least one token is left to read, since its logits give the first token of the answer.
        """
        num_shared = 0
        max_shared = min(len(self.cached_tokens), len(ids) - 1)
        while num_shared < max_shared and self.cached_tokens[num_shared] == ids[num_shared]:
            num_shared += 1
        try:
            self.cache.truncate(num_shared)
        except ClearheadError:  # a sliding window no longer has these tokens: read the conversation again
            self._clear_cache()
            return 0
        self.cached_tokens = self.cached_tokens[:num_shared]
        return num_shared


def require_chat_template(text_generator: TextGenerator) -> Tokenizer:
    """Return the tokenizer of a model that can chat; raise ClearheadError if the model cannot."""
    config = text_generator.network.config
    if config.decoder is None or config.is_encoder_decoder:
        raise ClearheadError("chat needs a decoder-only model; this one has an encoder")
    tokenizer = text_generator.tokenizer
    if tokenizer is None:
        raise ClearheadError("this model has no tokenizer, which chat needs; call generate with token ids")
    if tokenizer.chat_template is None:
        raise ClearheadError("this model has no chat template; use generate to continue a text")
    return tokenizer


def encode_messages(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Return the token ids of a conversation in the chat template, up to the start of the next answer."""
    return tokenizer.encode(render_chat(tokenizer, messages), add_special_tokens=False)


def check_message(message: object) -> None:
    """Raise ClearheadError unless a message is a text."""
    if not isinstance(message, str):
        raise ClearheadError(f"the message is {message!r}; it must be a text")
