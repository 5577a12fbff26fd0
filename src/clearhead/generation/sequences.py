"""TokenSequence: one sequence of a batch, from its prompt to its last token.

sequence = TokenSequence(prompt_ids, SamplingOptions(max_new_tokens=64)); check_sequences([sequence], network)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from clearhead.architecture import check_tokens
from clearhead.errors import ClearheadError
from clearhead.model import Transformer
from clearhead.options import SamplingOptions
from clearhead.sampling import TokenLogprobs

FinishReason = Literal["stop", "length", "context", "unfinished"]


@dataclass
class TokenSequence:
    """One sequence of a batch. A loop appends tokens until `finished`, which a caller may also set to stop it."""

    prompt: Sequence[int]
    options: SamplingOptions
    source: Sequence[int] = ()  # input of the encoder
    cached_tokens: Sequence[int] = ()  # tokens before the prompt, which the given cache already contains
    tokens: list[int] = field(default_factory=list)  # new tokens, a stop token included
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one per new token, if the options ask for them
    finished: bool = False

    @property
    def text(self) -> list[int]:
        """All tokens, from the cached ones to the newest."""
        return [*self.cached_tokens, *self.prompt, *self.tokens]

    @property
    def length(self) -> int:
        """Number of tokens of the text."""
        return len(self.cached_tokens) + len(self.prompt) + len(self.tokens)

    @property
    def finish_reason(self) -> FinishReason:
        """Return what ended the sequence.

        stop: a stop token; length: max_new_tokens; context: the learned positions are used up; unfinished: nothing yet.
        """
        if self.tokens and self.tokens[-1] in self.options.stop_ids:
            return "stop"
        if len(self.tokens) >= self.options.max_new_tokens:
            return "length"
        return "context" if self.finished else "unfinished"

    def append(self, token: int, max_tokens: int) -> None:
        """Add a new token; finish after a stop token, or after `max_tokens` or max_new_tokens tokens."""
        self.tokens.append(token)
        self.finished = token in self.options.stop_ids or len(self.tokens) >= min(
            self.options.max_new_tokens, max_tokens
        )


def check_sequences(sequences: Sequence[TokenSequence], network: Transformer) -> None:
    """Raise ClearheadError unless the network can read every prompt and its vocabulary has every id in the options."""
    if not sequences:
        raise ClearheadError("there is no prompt to continue; give at least one")
    for sequence in sequences:
        check_tokens(sequence.prompt, network.config.output_stack, len(sequence.cached_tokens))
        sequence.options.check_vocabulary(network.config.vocab_size)
