"""Request: what a caller asks the engine to generate, and Event: what the engine reports about it. No torch.

request = Request(prompt=[1, 2, 3], options=SamplingOptions(max_new_tokens=8)); check_request(request, network.config)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Any, Literal, NamedTuple, Protocol, Self

from clearhead.architecture import ModelConfig, check_tokens
from clearhead.errors import ClearheadError, quote
from clearhead.options import SamplingOptions, check_positive_integer

FinishReason = Literal["stop", "length", "context", "aborted", "error"]


class TokenFilter(Protocol):
    """Which tokens may come next in one text, such as the state of a grammar.

    The engine calls `allowed_tokens` before it chooses a token, and `accept` with every token that it has chosen, in
    the thread that runs its steps. If either raises an exception, the request ends with an error.
    """

    def allowed_tokens(self) -> Any:
        """Return a tensor or array of bools (V,), or of their bits as int32 (ceil(V / 32),), the lowest bit first.

        None allows every token. To end the text, allow nothing but its stop tokens.
        """

    def accept(self, token: int) -> None:
        """Move on to the state after `token`."""

    def fork(self) -> Self:
        """Return an independent filter in the same state, for another text of the same prompt."""


class TokenDrafter(Protocol):
    """Guesses the next tokens of one text; the engine reads them together with its last token and keeps the right ones.

    If it raises an exception, the request ends with an error.
    """

    @property
    def num_tokens(self) -> int:
        """The maximum number of tokens in a draft."""

    def draft(self, output: Sequence[int], count: int) -> Any:
        """Return a `sampling.Draft` of at most `count` tokens that may follow the prompt and the output."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One text to generate.

    prompt: token ids that the decoder reads first. source: token ids that the encoder of an encoder-decoder reads.
    salt: requests share the cached keys and values of a common prefix only if they have the same salt.
    prompt_logprobs: report the log-probability of every token of the prompt after the first, and of this many most
    likely alternatives. With max_new_tokens=0, the prompt is only scored. None: no log-probabilities of the prompt.
    token_filter: rules out tokens before each choice. It belongs to this request alone.
    drafter: guesses tokens, so that a step may add several. The distribution of the text does not change.
    """

    prompt: Sequence[int]
    options: SamplingOptions
    source: Sequence[int] = ()
    salt: bytes = b""
    prompt_logprobs: int | None = None
    token_filter: TokenFilter | None = None
    drafter: TokenDrafter | None = None

    def samples(self, n: int) -> "list[Request]":
        """Return requests for n texts of this prompt, with the seeds of `Model.generate(n=...)`.

        They share the pages of their prompt. Only the first one reports log-probabilities of the prompt.
        """
        check_positive_integer("n", n)
        requests = [replace(self, options=options) for options in self.options.for_samples(n)]
        others = [
            replace(
                each,
                prompt_logprobs=None,
                token_filter=None if self.token_filter is None else self.token_filter.fork(),
            )
            for each in requests[1:]
        ]
        return [requests[0], *others]


class PromptReport(NamedTuple):
    """What the engine found out while it read a prompt.

    num_cached: how many tokens of it were not computed, because their keys and values were cached.
    logprobs: a TokenLogprobs of all tokens after the first, (P - 1,) and (P - 1, n), if it was requested.
    """

    num_cached: int
    logprobs: Any = None


class Event(NamedTuple):
    """What happened to a request in one step: it got a token, it finished, or both.

    finish_reason: stop (a stop token), length (max_new_tokens), context (the learned positions are used up), aborted,
    or error (`error` says why); None while the request is running. logprobs: a TokenLogprobs, if it was requested.
    prompt: set in the event of the first token, or in the last event of a request with max_new_tokens=0.
    """

    request_id: int
    token: int | None = None
    logprobs: Any = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    prompt: PromptReport | None = None


def check_request(request: Request, config: ModelConfig) -> None:
    """Raise ClearheadError unless a model with this config can generate what a request asks for."""
    if config.decoder is None or config.head is None:
        raise ClearheadError("this model has no decoder with a head, so it cannot generate texts; it can embed them")
    if config.encoder is None and request.source:
        raise ClearheadError("this model has no encoder; leave out the source of the request")
    _check_integers("prompt", request.prompt)
    _check_integers("source", request.source)
    if config.encoder is not None:
        check_tokens(request.source, config.encoder)
    check_tokens(request.prompt, config.decoder)
    num_top = request.prompt_logprobs
    if num_top is not None and (not isinstance(num_top, int) or isinstance(num_top, bool) or num_top < 0):
        raise ClearheadError(f"prompt_logprobs is {quote(num_top)}; it must be a whole number, 0 or more")
    if request.token_filter is not None and request.drafter is not None:
        raise ClearheadError("a request with a token filter cannot use a drafter; leave one of them out")
    if not isinstance(request.salt, bytes):
        raise ClearheadError(f"the salt is {quote(request.salt)}; it must be bytes")
    request.options.check_vocabulary(config.vocab_size)


def _check_integers(name: str, ids: Sequence[int]) -> None:
    """Raise ClearheadError unless all token ids are integers."""
    for token in ids:
        try:
            index(token)
        except TypeError:
            raise ClearheadError(
                f"the {name} contains {quote(token)}; a token id is a whole number, 0 or more"
            ) from None
