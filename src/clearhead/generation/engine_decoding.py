"""The decode loop of the engine: the same tokens as decoding.py, for many sequences at once without padding.

    if can_decode_in_engine(provider, sequences): steps = decode_in_engine(provider, sequences)

Sequences of several calls in different threads share their steps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from clearhead.architecture import remaining_positions
from clearhead.engine import EngineProvider, Event, Request, SharedEngine, unsupported_by_engine
from clearhead.errors import ClearheadError
from clearhead.generation.sequences import TokenSequence, check_sequences
from clearhead.generation.speculative import Speculation, check_speculation, make_drafter
from clearhead.sampling import Draft


def can_decode_in_engine(provider: EngineProvider, sequences: Sequence[TokenSequence]) -> bool:
    """Return whether the engine supports the network and has room for these sequences, which must have no cache yet."""
    if unsupported_by_engine(provider.network.config) or any(each.cached_tokens for each in sequences):
        return False
    return bool(sequences) and provider.has_room(_requests(sequences))


def decode_in_engine(
    provider: EngineProvider,
    sequences: Sequence[TokenSequence],
    deterministic: bool | None = None,
    speculation: Speculation | None = None,
) -> Iterator[None]:
    """Check the sequences and return an iterator that adds tokens to them, at most one to each per iteration.

    deterministic: as for Engine. speculation: as for `decode_speculatively`.
    """
    check_sequences(sequences, provider.network)
    requests = _requests(sequences)
    if speculation is not None:
        check_speculation(provider.network, speculation)
        pairs = zip(requests, sequences, strict=True)
        requests = [replace(request, drafter=_SequenceDrafter(each, speculation)) for request, each in pairs]
    return _engine_steps(provider.engine_for(requests, deterministic), requests, sequences)


def require_engine(provider: EngineProvider, sequences: Sequence[TokenSequence]) -> None:
    """Raise ClearheadError if the engine, which deterministic texts need, cannot generate these sequences."""
    if reason := unsupported_by_engine(provider.network.config):
        raise ClearheadError(f"deterministic=True needs the engine, which cannot run this model: {reason}")
    if not can_decode_in_engine(provider, sequences):
        raise ClearheadError(
            "deterministic=True needs the engine, which has too little memory for these texts; ask for fewer tokens"
        )


class _SequenceDrafter:
    """Drafts for one sequence of the engine."""

    def __init__(self, sequence: TokenSequence, speculation: Speculation):
        self.sequence = sequence
        self.drafter = make_drafter(speculation, sequence)

    @property
    def num_tokens(self) -> int:
        return self.drafter.num_tokens

    @torch.inference_mode()
    def draft(self, output: Sequence[int], count: int) -> Draft:
        return self.drafter.draft(replace(self.sequence, tokens=list(output)), count)


def _requests(sequences: Sequence[TokenSequence]) -> list[Request]:
    return [Request(prompt=each.prompt, options=each.options, source=each.source) for each in sequences]


def _engine_steps(
    shared: SharedEngine, requests: Sequence[Request], sequences: Sequence[TokenSequence]
) -> Iterator[None]:
    stack = shared.engine.network.config.output_stack
    running: dict[int, TokenSequence] = {}
    try:
        for request, sequence in zip(requests, sequences, strict=True):
            running[shared.add(request)] = sequence
        for events in shared.events(running):
            for part in _one_per_sequence(events):
                for event in part:
                    if event.error is not None:
                        raise ClearheadError(event.error)
                    sequence = running[event.request_id]
                    if event.token is not None and not sequence.finished:
                        sequence.append(event.token, remaining_positions(stack, len(sequence.prompt)))
                        sequence.logprobs += [] if event.logprobs is None else [event.logprobs]
                yield
            # The text of a sequence may have ended with a stop string, which the engine does not know.
            shared.discard([request_id for request_id, sequence in running.items() if sequence.finished])
    finally:
        shared.discard(running)


def _one_per_sequence(events: Sequence[Event]) -> Iterator[list[Event]]:
    """Divide events into parts with at most one of each sequence, because a stop string may end it after any token."""
    waiting = list(events)
    while waiting:
        part = {event.request_id: event for event in reversed(waiting)}
        yield list(part.values())
        waiting = [event for event in waiting if event is not part[event.request_id]]
