"""Checks of the recurrent baseline: steps, batches, padding and generation against one forward pass.

    for result in verify_recurrent(model): print(result.check, result.verdict)

The reference reads one pair of sequences at once with teacher forcing (`RecurrentTranslator.forward`). A recurrent
network has neither a cache nor a fast path, so the checks of Transformers do not apply.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from clearhead.api import RecurrentBaseline
from clearhead.generation import pad_right, translate
from clearhead.model import RecurrentTranslator
from clearhead.verification.results import CheckResult, LogitComparison, judge

_LENGTHS = (24, 15, 6)  # of the sequences of a batch, the longest first
_NUM_NEW_TOKENS = 32


@dataclass(frozen=True)
class RecurrentCase:
    """A recurrent network, random pairs of source and target, and the number of tokens it generates."""

    model: RecurrentBaseline
    length: int
    num_new_tokens: int

    @property
    def network(self) -> RecurrentTranslator:
        return self.model.network

    @property
    def dtype(self) -> torch.dtype:
        return self.network.head.weight.dtype

    @cached_property
    def pairs(self) -> list[tuple[list[int], list[int]]]:
        """Sources and targets of several lengths; a long source has a short target."""
        lengths = [max(round(self.length * each / _LENGTHS[0]), 1) for each in _LENGTHS]
        generator, config = torch.Generator().manual_seed(0), self.network.config

        def draw(vocab_size: int, length: int) -> list[int]:
            return torch.randint(vocab_size, (length,), generator=generator).tolist()

        sizes = zip(lengths, reversed(lengths), strict=True)
        return [(draw(config.source_vocab_size, s), draw(config.target_vocab_size, t)) for s, t in sizes]

    def batch(self, sequences: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
        """Return the tokens and the mask (B, T) of a padded batch."""
        return pad_right(sequences, self.network.head.weight.device)

    @cached_property
    def expected(self) -> list[Tensor]:
        """The logits (1, T, V) of each pair, alone and at once."""
        return [self.network(self.batch([source])[0], self.batch([target])[0]) for source, target in self.pairs]


def _steps(case: RecurrentCase) -> LogitComparison:
    """Compare teacher forcing with one call per token."""
    compared = []
    for (source, target), expected in zip(case.pairs, case.expected, strict=True):
        encoder_output = case.network.encode(case.batch([source])[0])
        state, logits = case.network.initial_state(encoder_output), []
        for token in case.batch([target])[0].unbind(dim=1):
            step_logits, state = case.network.step(token, state, encoder_output)
            logits.append(step_logits)
        compared.append((torch.stack(logits, dim=1), expected))
    return LogitComparison(compared, f"{sum(len(target) for _, target in case.pairs)} tokens, one call each")


def _padding(case: RecurrentCase) -> LogitComparison:
    """Compare pairs alone with pairs in one padded batch."""
    (sources, source_mask), (targets, target_mask) = (
        case.batch([pair[side] for pair in case.pairs]) for side in (0, 1)
    )
    logits = case.network(sources, targets, source_mask, target_mask)
    rows = [(row[None, : one.shape[1]], one) for row, one in zip(logits, case.expected, strict=True)]
    return LogitComparison(rows, f"{len(rows)} pairs of different lengths in one batch")


def _generation(case: RecurrentCase) -> LogitComparison:
    """Compare the generated tokens with the most likely ones of a pass over the whole answer."""
    start, sources = case.model.special_ids["decoder_start_token_id"], [source for source, _ in case.pairs]
    answers = translate(case.network, sources, start_id=start, stop_ids=set(), max_new_tokens=case.num_new_tokens)
    compared = []
    for source, answer in zip(sources, answers, strict=True):
        logits = case.network(case.batch([source])[0], case.batch([[start, *answer[:-1]]])[0])
        chosen = logits.gather(-1, case.batch([answer])[0][..., None])
        compared.append((chosen, logits.amax(dim=-1, keepdim=True)))
    return LogitComparison(compared, f"{case.num_new_tokens} tokens of each of {len(sources)} sources")


CHECKS: dict[str, Callable[[RecurrentCase], LogitComparison]] = {
    "step by step == whole target": _steps,
    "padded batch == alone": _padding,
    "generation == largest logits of a whole pass": _generation,
}


def verify_recurrent(
    model: RecurrentBaseline,
    *,
    length: int | None = None,
    num_new_tokens: int | None = None,
    progress: Callable[[str, int, int], object] = lambda check, done, total: None,
) -> Iterator[CheckResult]:
    """Run all checks and yield one result after another; the arguments are those of `verify`."""
    case = RecurrentCase(model, length or _LENGTHS[0], num_new_tokens or _NUM_NEW_TOKENS)
    for done, (name, check) in enumerate(CHECKS.items()):
        progress(name, done, len(CHECKS))
        yield judge(name, partial(check, case), case.dtype)
