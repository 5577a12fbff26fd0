"""EngineSequence: one request on its way through the engine. It uses no tensors.

sequence = EngineSequence(request_id=0, request=request, max_new_tokens=8)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from clearhead.cache import PageTable
from clearhead.engine.request import FinishReason, Request

State = Literal["waiting", "running", "finished"]
PENDING = -1  # stands for a token that has been chosen on the device, but is not known to the host yet


@dataclass(eq=False)
class EngineSequence:
    """A request with the tokens it has got so far.

    waiting    it has no pages: it is new, or it was preempted and will be computed again
    running    its page table holds the keys and values of its first `num_computed` tokens
    finished   it has no pages, and nothing will be added to it
    """

    request_id: int
    request: Request
    max_new_tokens: int  # that of the options, or fewer if the learned positions end earlier
    output: list[int] = field(default_factory=list)
    num_pending: int = 0  # tokens after the output that are not known yet
    state: State = "waiting"
    finish_reason: FinishReason | None = None
    table: PageTable | None = None
    source_table: PageTable | None = None  # pages of the cross-attention keys and values
    needs_encoding: bool = False  # whether the source pages are still empty
    prefix_hashes: list[bytes] = field(default_factory=list)  # one for each full page of the prompt
    num_cached: int | None = None  # tokens of the prompt that were cached when it was first read
    num_scored: int = 0  # tokens of the prompt after which the next one has been scored
    draft: Any = None  # a Draft of the tokens that follow the output, until they are accepted or rejected
    prompt_scores: list[Any] = field(default_factory=list)  # a TokenLogprobs of each part

    @property
    def salt(self) -> bytes:
        """The salt of the request, and the source, on which the decoder's keys and values depend."""
        source = b"".join(token.to_bytes(8, "little") for token in self.request.source)
        return len(self.request.salt).to_bytes(8, "little") + self.request.salt + source

    @property
    def unpublished_prefix(self) -> list[bytes]:
        """The hashes of the full pages of the prompt that other sequences cannot use yet."""
        return self.prefix_hashes[0 if self.table is None else len(self.table.hashes) :]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the prompt and the output. The last one has not been read by the network yet."""
        return self.num_known + self.num_pending

    @property
    def num_known(self) -> int:
        """Number of these tokens that the host knows."""
        return len(self.request.prompt) + len(self.output)

    @property
    def is_complete(self) -> bool:
        """Whether the last token that is allowed has been chosen, so that nothing more is to be read."""
        if self.max_new_tokens == 0:  # the prompt is only scored
            return self.num_remaining == 0
        return len(self.output) + self.num_pending >= self.max_new_tokens

    @property
    def waits_for_token(self) -> bool:
        """Whether the next step needs a token that the host does not know yet: a filter depends on it."""
        return self.num_pending > 0 and self.needs_tokens

    @property
    def needs_tokens(self) -> bool:
        """Whether the host must know every token before the next step: a filter or a drafter depends on it."""
        return self.request.token_filter is not None or self.request.drafter is not None

    @property
    def drafted(self) -> list[int]:
        """The drafted tokens."""
        return [] if self.draft is None else self.draft.tokens

    @property
    def num_to_score(self) -> int:
        """Number of tokens of the prompt after which the next one is to be scored."""
        return 0 if self.request.prompt_logprobs is None else len(self.request.prompt) - 1

    @property
    def num_computed(self) -> int:
        """Number of tokens that have slots in the page table."""
        return 0 if self.table is None else self.table.num_tokens

    @property
    def num_remaining(self) -> int:
        """Number of tokens that the network must read before it can predict the next one."""
        return self.num_tokens - self.num_computed

    def tokens(self, start: int, stop: int) -> list[int]:
        """Return the tokens from `start` up to `stop`, of the prompt, then the output, then the draft."""
        prompt: Sequence[int] = self.request.prompt
        length = len(prompt)
        if start >= length and stop == start + 1:  # the last token of a running sequence
            return [self.output[start - length] if start < length + len(self.output) else PENDING]
        output = [*self.output, *self.drafted][max(start - length, 0) : max(stop - length, 0)]
        num_pending = stop - max(start, self.num_known) - len(self.drafted)
        return [*prompt[start:stop], *output, *[PENDING] * num_pending]

    def append(self, token: int) -> None:
        """Add a new token that was pending, and finish after a stop token or the last token that is allowed."""
        num_known = self.num_known
        if self.table is not None and self.table.num_tokens > num_known:
            self.table.tokens[num_known] = token  # the next step has been scheduled already
        self.output.append(token)
        self.num_pending = max(self.num_pending - 1, 0)  # an accepted draft is not counted
        if token in self.request.options.stop_ids:
            self.finish_reason = "stop"
        elif len(self.output) >= self.request.options.max_new_tokens:
            self.finish_reason = "length"
        elif len(self.output) >= self.max_new_tokens:
            self.finish_reason = "context"

    def release(self) -> None:
        """Give all pages back."""
        for table in (self.table, self.source_table):
            if table is not None:
                table.free()
        self.table = self.source_table = self.draft = None
