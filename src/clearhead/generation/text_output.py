"""TextOutput: the text of one sequence, extended as its tokens arrive, in whole characters and without stop strings.

output = TextOutput(tokenizer, sequence); piece = output.update()   # after each step of the decode loop
"""

from collections.abc import Iterator

from clearhead.generation.prompts import explain_out_of_memory
from clearhead.generation.sequences import FinishReason, TokenSequence
from clearhead.generation.stop_strings import StopStringMatcher
from clearhead.tokenization import StreamDecoder, Tokenizer


class TextOutput:
    """The text of a sequence. Without a tokenizer it stays empty."""

    def __init__(self, tokenizer: Tokenizer | None, sequence: TokenSequence):
        self.sequence = sequence
        self.decoder = _continue_prompt(sequence, tokenizer) if tokenizer is not None else None
        self.matcher = StopStringMatcher(sequence.options.stop)
        self.num_decoded = 0
        self.parts: list[str] = []

    def update(self) -> str:
        """Return the text that the newest tokens add. A stop string finishes the sequence."""
        if self.decoder is None:
            return ""
        piece = ""
        tokens, stop_ids = self.sequence.tokens, self.sequence.options.stop_ids
        while self.num_decoded < len(tokens):
            token = tokens[self.num_decoded]
            self.num_decoded += 1
            if token not in stop_ids:
                piece += self._match(self.decoder.push(token))
        if self.sequence.finished and not self.matcher.finished:
            piece += self._match(self.decoder.finish()) + self.matcher.finish()
        self.parts.append(piece)
        return piece

    def _match(self, text: str) -> str:
        may_stop = self.num_decoded >= self.sequence.options.min_new_tokens
        output, stopped = self.matcher.push(text, may_stop)
        self.sequence.finished = self.sequence.finished or stopped
        return output

    def pieces(self, steps: Iterator[None]) -> Iterator[str]:
        """Yield the text that each step of a decode loop adds."""
        with explain_out_of_memory():
            for _ in steps:
                yield self.update()

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.parts)

    @property
    def finish_reason(self) -> FinishReason:
        """The finish reason of the sequence; `stop` also after a stop string."""
        return "stop" if self.matcher.finished else self.sequence.finish_reason


def _continue_prompt(sequence: TokenSequence, tokenizer: Tokenizer) -> StreamDecoder:
    """Return a decoder that continues the prompt, since otherwise the first word would lose its leading space.

    The answer of an encoder-decoder starts a new text, and so does text after a special token.
    """
    last = sequence.prompt[-1] if sequence.prompt and not sequence.source else None
    return StreamDecoder(tokenizer, previous_id=None if last in tokenizer.special_ids else last)
