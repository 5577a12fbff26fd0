"""Compute log-probabilities of continuations in the engine, which a server uses: the same bits as over its API.

    likelihoods = log_likelihoods_in_engine(model.engine(deterministic=True), requests)

`log_likelihoods` pads requests to batches and runs the network's modules, whose sums are added in another order than
those of the kernels. The results differ from these by rounding.
"""

from collections.abc import Sequence

from clearhead.engine import Engine
from clearhead.engine import Request as EngineRequest
from clearhead.errors import ClearheadError
from clearhead.evaluation.likelihood import Likelihood, Request
from clearhead.options import SamplingOptions
from clearhead.sampling import TokenLogprobs


def log_likelihoods_in_engine(engine: Engine, requests: Sequence[Request]) -> list[Likelihood]:
    """Return the likelihood of each request, in the order of the requests. The engine must be idle."""
    options = SamplingOptions(max_new_tokens=0)
    prompts = [(*request.context, *request.continuation) for request in requests]
    ids = [engine.add(EngineRequest(prompt=prompt, options=options, prompt_logprobs=1)) for prompt in prompts]
    scores: dict[int, TokenLogprobs] = {}
    while engine.has_work:
        for event in engine.step():
            if event.error is not None:
                raise ClearheadError(event.error)
            if event.prompt is not None:
                scores[event.request_id] = event.prompt.logprobs
    return [_likelihood(request, scores[number]) for request, number in zip(requests, ids, strict=True)]


def _likelihood(request: Request, scores: TokenLogprobs) -> Likelihood:
    """Return the part that belongs to the continuation. Several tokens may be equally likely."""
    count = len(request.continuation)
    chosen, most_likely = scores.chosen[-count:], scores.top[-count:, 0]
    return Likelihood(tuple(chosen.tolist()), bool((chosen == most_likely).all()))
