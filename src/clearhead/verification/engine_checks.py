"""Checks of the engine: a request gets the tokens of a full forward pass, alone and among others.

comparison = engine(case); comparison.difference
"""

from collections.abc import Sequence

from clearhead.engine import Engine, Request, bytes_per_token, unsupported_by_engine
from clearhead.generation import TokenSequence
from clearhead.verification.case import VerificationCase
from clearhead.verification.generation_checks import compare_with_argmax, require_decoder
from clearhead.verification.results import CheckSkipped, LogitComparison

_PAGE_SIZE = 32
_MAX_TOKENS = 48  # per step, so that prompts are read in several steps while other texts are written


def engine(case: VerificationCase) -> LogitComparison:
    """Check texts of different length that share steps, one of them twice, with too few pages for all at once."""
    require_decoder(case)
    if reason := unsupported_by_engine(case.config):
        raise CheckSkipped(f"the engine cannot run this model: {reason}")
    indices = [*range(len(case.sequences)), 0]
    sequences = [case.prompt(index, -(-case.num_new_tokens // (place + 1))) for place, index in enumerate(indices)]
    num_pages = 1 + max(_num_pages(sequence) for sequence in sequences) * 3 // 2
    num_pages = max(num_pages, *(-(-len(source) // _PAGE_SIZE) for source in [[], *case.sources]))
    runner = Engine(
        case.network,
        memory=num_pages * _PAGE_SIZE * bytes_per_token(case.config.output_stack, case.dtype),
        max_tokens=_MAX_TOKENS,
        max_sequences=len(sequences),
        page_size=_PAGE_SIZE,
    )
    _generate(runner, case, sequences, indices)
    comparison = compare_with_argmax(case, sequences, indices)
    return LogitComparison(comparison.pairs, f"{comparison.detail}, {len(sequences)} texts on {num_pages} pages")


def _generate(
    runner: Engine, case: VerificationCase, sequences: Sequence[TokenSequence], indices: Sequence[int]
) -> None:
    """Run the sequences as requests that arrive one step after another, and add the tokens to them."""
    waiting = list(zip(sequences, indices, strict=True))
    running: dict[int, TokenSequence] = {}
    while waiting or runner.has_work:
        if waiting:
            sequence, index = waiting.pop(0)
            source = case.sources[index] if case.sources else ()
            running[runner.add(Request(prompt=sequence.prompt, options=sequence.options, source=source))] = sequence
        for event in runner.step():
            if event.error is not None:
                raise RuntimeError(event.error)
            sequence = running[event.request_id]
            sequence.tokens += [] if event.token is None else [event.token]
            sequence.logprobs += [] if event.logprobs is None else [event.logprobs]


def _num_pages(sequence: TokenSequence) -> int:
    """Return the number of pages that a sequence fills."""
    return -(-(len(sequence.prompt) + sequence.options.max_new_tokens) // _PAGE_SIZE)
