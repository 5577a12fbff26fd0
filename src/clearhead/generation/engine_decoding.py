"""The decode loop of the engine: the same tokens as decoding.py, for many sequences at once without padding.

    if can_decode_in_engine(provider, sequences): steps = decode_in_engine(provider, sequences)

Sequences of several calls in different threads share their steps.
"""

from collections.abc import Iterator, Sequence

from clearhead.architecture import remaining_positions
from clearhead.engine import EngineProvider, Request, SharedEngine, unsupported_by_engine
from clearhead.errors import ClearheadError
from clearhead.generation.sequences import TokenSequence, check_sequences


def can_decode_in_engine(provider: EngineProvider, sequences: Sequence[TokenSequence]) -> bool:
    """Return whether the engine supports the network and has room for new sequences, without a cache of their own."""
    if unsupported_by_engine(provider.network.config) or any(each.cached_tokens for each in sequences):
        return False
    return bool(sequences) and provider.has_room(_requests(sequences))


def decode_in_engine(
    provider: EngineProvider, sequences: Sequence[TokenSequence], deterministic: bool | None = None
) -> Iterator[None]:
    """Check the sequences and return an iterator that adds tokens to them, at most one to each per iteration.

    deterministic: as for Engine.
    """
    check_sequences(sequences, provider.network)
    requests = _requests(sequences)
    return _engine_steps(provider.engine_for(requests, deterministic), requests, sequences)


def require_engine(provider: EngineProvider, sequences: Sequence[TokenSequence]) -> None:
    """Raise ClearheadError if texts that shall be deterministic cannot be generated in the engine."""
    if reason := unsupported_by_engine(provider.network.config):
        raise ClearheadError(f"deterministic needs the engine, which cannot run this model: {reason}")
    if not can_decode_in_engine(provider, sequences):
        raise ClearheadError(
            "deterministic needs the engine, which has too little memory for these texts; ask for fewer tokens"
        )


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
            for event in events:
                if event.error is not None:
                    raise ClearheadError(event.error)
                sequence = running[event.request_id]
                if event.token is not None:
                    sequence.append(event.token, remaining_positions(stack, len(sequence.prompt)))
                    sequence.logprobs += [] if event.logprobs is None else [event.logprobs]
            yield
            # The text of a sequence may have ended with a stop string, which the engine does not know.
            shared.discard([request_id for request_id, sequence in running.items() if sequence.finished])
    finally:
        shared.discard(running)
