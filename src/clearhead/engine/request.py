"""Request: what a caller asks the engine to generate, and Event: what the engine reports about it. No torch.

request = Request(prompt=[1, 2, 3], options=SamplingOptions(max_new_tokens=8)); check_request(request, network.config)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from clearhead.architecture import ModelConfig, check_tokens
from clearhead.errors import ClearheadError
from clearhead.options import SamplingOptions

FinishReason = Literal["stop", "length", "context", "aborted", "error"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One text to generate.

    prompt: token ids that the decoder reads first. source: token ids that the encoder of an encoder-decoder reads.
    salt: requests share the cached keys and values of a common prefix only if they have the same salt.
    """

    prompt: Sequence[int]
    options: SamplingOptions
    source: Sequence[int] = ()
    salt: bytes = b""


class Event(NamedTuple):
    """What happened to a request in one step: it got a token, it finished, or both.

    finish_reason: stop (a stop token), length (max_new_tokens), context (the learned positions are used up), aborted,
    or error (`error` says why); None while the request is running. logprobs: a TokenLogprobs, if it was requested.
    """

    request_id: int
    token: int | None = None
    logprobs: Any = None
    finish_reason: FinishReason | None = None
    error: str | None = None


def check_request(request: Request, config: ModelConfig) -> None:
    """Raise ClearheadError unless a model with this config can generate what a request asks for."""
    if config.decoder is None or config.head is None:
        raise ClearheadError("this model has no decoder with a head, so it cannot generate texts; it can embed them")
    if config.encoder is None and request.source:
        raise ClearheadError("this model has no encoder; leave out the source of the request")
    if config.encoder is not None:
        check_tokens(request.source, config.encoder)
    check_tokens(request.prompt, config.decoder)
    for name, ids in (("logit_bias", dict(request.options.logit_bias)), ("stop_ids", request.options.stop_ids)):
        for token in ids:
            if token >= config.vocab_size:
                raise ClearheadError(
                    f"{name} contains token {token}; the vocabulary has the ids 0 to {config.vocab_size - 1}"
                )
