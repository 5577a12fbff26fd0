"""Drafts of running sequences: guessed before a step is scheduled, settled when its tokens are known.

for sequence, error in draft_tokens(scheduler.running): ...
"""

from collections import Counter
from collections.abc import Sequence

from clearhead.engine.sampler import Choices
from clearhead.engine.scheduler import ScheduledTokens
from clearhead.engine.sequence import EngineSequence


def draft_tokens(sequences: Sequence[EngineSequence]) -> list[tuple[EngineSequence, str]]:
    """Let drafters guess the next tokens of sequences that read one token in the next step; return their errors."""
    errors = []
    for sequence in sequences:
        drafter = sequence.request.drafter
        if drafter is None or sequence.num_pending or sequence.num_remaining != 1:
            continue
        # A step gives one token more than it accepts, so the draft leaves room for it.
        count = min(drafter.num_tokens, sequence.max_new_tokens - len(sequence.output) - 1)
        try:
            sequence.draft = drafter.draft(sequence.output, count) if count > 0 else None
        except Exception as error:
            errors.append((sequence, f"the drafter of this request failed with {type(error).__name__}: {error}"))
    return errors


def settle_drafts(items: Sequence[ScheduledTokens], choices: Choices) -> tuple[int, int]:
    """Take back the slots of rejected tokens; return the number of drafted tokens and of accepted ones."""
    num_drafted = num_accepted = 0
    num_chosen = Counter(sequence for sequence, _ in choices)
    for sequence, start in [(item.sequence, item.start) for item in items if item.sequence.draft is not None]:
        if sequence.table is not None:
            sequence.table.truncate(start + num_chosen[sequence])
            num_drafted += len(sequence.drafted)
            num_accepted += num_chosen[sequence] - 1
        sequence.draft = None
    return num_drafted, num_accepted
