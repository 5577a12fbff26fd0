"""Check the deterministic mode of the engine: a text has the same bits alone and among others.

comparison = determinism(case); comparison.difference   # 0.0

The check must be able to fail, so it ends with a negative control: the logits of a step with several rows are changed
by one rounding error, as a product does whose sums depend on the number of rows. The comparison must notice that.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from clearhead.engine import Engine, Request, bytes_per_token, unsupported_by_engine
from clearhead.options import SamplingOptions
from clearhead.verification.case import VerificationCase
from clearhead.verification.generation_checks import require_decoder
from clearhead.verification.results import CheckSkipped, LogitComparison, largest_difference

_PAGE_SIZE = 16
_PROMPT, _NEW = 40, 24  # tokens of the longest prompt, and of each text
_MAX_TOKENS = 24  # per step, so that prompts are read in parts while other texts are written
_NUM_TOP = 3


def determinism(case: VerificationCase) -> LogitComparison:
    """Compare the tokens and log-probabilities of texts alone and together, in parts, preempted and with a prefix."""
    require_decoder(case)
    if reason := unsupported_by_engine(case.config):
        raise CheckSkipped(f"the engine cannot run this model: {reason}")
    requests = _requests(case)
    together, num_preemptions = _run_together(case, requests, deterministic=True)
    pairs = list(zip(together, _run_alone(case, requests, deterministic=True), strict=True))
    with _variant_logits(case):
        broken, _ = _run_together(case, requests, deterministic=False)
        alone = _run_alone(case, requests, deterministic=False)
    if all(largest_difference(*pair) == 0.0 for pair in zip(broken, alone, strict=True)):
        raise RuntimeError("the negative control failed: logits that depend on the number of rows were not noticed")
    detail = f"bit by bit, {len(requests)} texts, {num_preemptions} preemptions; dependence on other rows is noticed"
    return LogitComparison(pairs, detail, tolerance=0.0)


def _requests(case: VerificationCase) -> list[Request]:
    """Return a request for each sequence, one of them sampled, and the first one again, which finds a cached prefix."""
    num_new = min(_NEW, case.num_new_tokens)
    requests = []
    for index, sequence in enumerate(case.sequences):
        prompt = sequence[:1] if case.sources else sequence[:_PROMPT]
        temperature = 1.0 if index == 1 else 0.0
        options = SamplingOptions(max_new_tokens=num_new, temperature=temperature, seed=index, logprobs=_NUM_TOP)
        source = case.sources[index] if case.sources else ()
        requests.append(Request(prompt=prompt, options=options, source=source, prompt_logprobs=_NUM_TOP))
    return [*requests, replace(requests[0], prompt_logprobs=None)]


def _run_together(case: VerificationCase, requests: Sequence[Request], deterministic: bool) -> tuple[list[Tensor], int]:
    """Run all requests on too few pages, and return their results and the number of preemptions."""
    longest = max(len(request.prompt) + request.options.max_new_tokens for request in requests)
    num_pages = max(2 * -(-longest // _PAGE_SIZE), *(-(-len(source) // _PAGE_SIZE) for source in [[], *case.sources]))
    engine = _engine(case, num_pages, _MAX_TOKENS, deterministic)
    return _results(engine, requests), engine.statistics.num_preemptions


def _run_alone(case: VerificationCase, requests: Sequence[Request], deterministic: bool) -> list[Tensor]:
    """Run each request in an engine of its own, and return the results."""
    num_tokens = [len(each.prompt) + len(each.source) + each.options.max_new_tokens for each in requests]
    num_pages = max(num_tokens) // _PAGE_SIZE + 2
    return [
        result
        for request in requests
        for result in _results(_engine(case, num_pages, num_pages * _PAGE_SIZE, deterministic), [request])
    ]


def _engine(case: VerificationCase, num_pages: int, max_tokens: int, deterministic: bool) -> Engine:
    return Engine(
        case.network,
        memory=num_pages * _PAGE_SIZE * bytes_per_token(case.config.output_stack, case.dtype),
        max_tokens=max_tokens,
        max_sequences=min(max_tokens, 8),
        page_size=_PAGE_SIZE,
        deterministic=deterministic,
    )


def _results(engine: Engine, requests: Sequence[Request]) -> list[Tensor]:
    """Return the log-probabilities of each request in one row of numbers: of its prompt, its tokens and alternatives.

    The tokens themselves are among the numbers.
    """
    numbers: dict[int, list[Tensor]] = {}
    for event in engine.run(requests):
        if event.error is not None:
            raise RuntimeError(event.error)
        logprobs = [each for each in (event.prompt and event.prompt.logprobs, event.logprobs) if each is not None]
        parts = [part for each in logprobs for part in (each.chosen, each.top, each.top_ids)]
        numbers.setdefault(event.request_id, []).extend([torch.tensor([event.token or 0]), *parts])
    return [torch.cat([part.flatten().double().cpu() for part in numbers[key]]) for key in sorted(numbers)]


@contextmanager
def _variant_logits(case: VerificationCase) -> Iterator[None]:
    """Change the logits of several rows by one rounding error while the context lasts."""

    # Log-probabilities are computed in float32, whatever the logits are.
    error = max(torch.finfo(case.dtype).eps, torch.finfo(torch.float32).eps)

    def change(module: object, inputs: object, logits: Tensor) -> Tensor:
        if len(logits) == 1:
            return logits
        # Log-probabilities are about -log(vocabulary) if logits are small: an error of that size reaches every second.
        every_second = torch.arange(logits.shape[-1], device=logits.device) % 2
        return (logits * (1 + error) + error * math.log(logits.shape[-1]) * every_second).to(logits.dtype)

    assert case.network.head is not None
    handle = case.network.head.register_forward_hook(change)
    try:
        yield
    finally:
        handle.remove()
