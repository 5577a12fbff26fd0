"""The text of a row while its tokens come in: whole characters only, and no stop string.

transcript = Transcript(tokenizer, row); piece = transcript.read()   # after each turn of the decode loop
"""

from clearhead.generation.decode import TokenSequence
from clearhead.generation.stops import StopWatcher
from clearhead.tokenization import StreamDecoder, Tokenizer


class Transcript:
    """Without a tokenizer the text stays empty."""

    def __init__(self, tokenizer: Tokenizer | None, row: TokenSequence):
        self.row = row
        self.decoder = decoder_after(row, tokenizer) if tokenizer is not None else None
        self.watcher = StopWatcher(row.options.stop)
        self.num_read = 0
        self.pieces: list[str] = []

    def read(self) -> str:
        """The text that the newest tokens add; a stop string ends the row."""
        if self.decoder is None:
            return ""
        piece = ""
        for token in self.row.tokens[self.num_read :]:
            self.num_read += 1
            if token not in self.row.options.stop_ids:
                piece += self.watch(self.decoder.push(token))
        if self.row.done and not self.watcher.finished:
            piece += self.watch(self.decoder.finish()) + self.watcher.finish()
        self.pieces.append(piece)
        return piece

    def watch(self, text: str) -> str:
        early = self.num_read < self.row.options.min_new_tokens
        shown, stopped = self.watcher.push(text, early)
        self.row.done = self.row.done or stopped
        return shown

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def finish_reason(self) -> str:
        """As of its row; a stop string is a `stop` too."""
        return "stop" if self.watcher.finished else self.row.finish_reason


def decoder_after(row: TokenSequence, tokenizer: Tokenizer) -> StreamDecoder:
    """One that continues the prompt, or the first word would lose its space; an answer begins a text."""
    last = row.prompt[-1] if row.prompt and not row.source else None
    return StreamDecoder(tokenizer, after=None if last in tokenizer.special_ids else last)
