"""Run the steps of an engine in several processes, each of which holds a shard of the network (tensor parallelism).

    engine = Engine(shard, channel=channel)        # in the process that schedules and samples
    follow_steps(shard, channel)                   # in every other one, until the first one ends

Only the first process knows requests. Before each forward pass, it sends the packed tokens and where they are stored to
the others, and all run it: the shards add up their partial sums inside each block (all-reduce). A message is a kind and
some tensors of integers; it contains no code.

    PAGES    number of pages, tokens per page, whether there are sources     the other processes allocate the same
    RUN      whether there are prompts; tokens, layout, layout of sources    a forward pass of the decoder
    ENCODE   tokens, layout                                                  a forward pass of the encoder
    COPY     pages to copy and where                                         before they are written to
    IDLE                                                                     nothing: the first process is alive
    STOP                                                                     the end
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from clearhead.cache import PackedLayout, PageCopy, PagePool, PageStorage
from clearhead.engine.batch import PackedBatch
from clearhead.engine.runner import Runner
from clearhead.errors import ClearheadError
from clearhead.model import Transformer

_LAYOUT = tuple(each.name for each in fields(PackedLayout))


class MessageKind(IntEnum):
    """What the other processes do with a message."""

    PAGES = 0
    RUN = 1
    ENCODE = 2
    COPY = 3
    IDLE = 4
    STOP = 5


class LostProcessError(ClearheadError):
    """Another process of the engine has ended or does not answer, so that no further step can be run."""


class Channel(Protocol):
    """Messages from the first process to all others; `parallel.ProcessGroup` sends them with torch.distributed."""

    def send(self, kind: MessageKind, tensors: Sequence[Tensor]) -> None:
        """Send a message to all other processes. Raise LostProcessError if that is not possible."""

    def receive(self) -> tuple[MessageKind, list[Tensor]]:
        """Wait for the next message. Raise LostProcessError if the first process has ended."""


@dataclass(frozen=True)
class LeadingRunner(Runner):
    """A runner whose forward passes run in the other processes too. An error in any process ends all of them.

    After an error, the processes would wait for each other in different sums, so a step cannot be tried again.
    """

    channel: Channel | None = None

    def announce_pages(self) -> None:
        """Let the other processes allocate as many pages as this one has."""
        pool, has_sources = self.storage.pool, self.source_storage is not None
        self._send(MessageKind.PAGES, torch.tensor([pool.num_pages, pool.page_size, has_sources]))

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages in all processes before they are written to."""
        if copies:
            self._send(MessageKind.COPY, *torch.tensor(copies).T)
            super().copy_pages(copies)

    def run_together(self, batch: PackedBatch) -> Tensor:
        """Read the tokens of a batch in one forward pass of all processes (T, D)."""
        layouts = [batch.layout] if batch.source_layout is None else [batch.layout, batch.source_layout]
        parts = [part for layout in layouts for part in _flatten(layout)]
        try:
            self._send(MessageKind.RUN, torch.tensor([batch.has_prompts]), batch.tokens, *parts)
            return super().run_together(batch)
        except Exception as error:
            raise _lost(error) from error

    def encode_together(self, tokens: Tensor, layout: PackedLayout) -> None:
        """Run the encoder on packed sources (S,) in one forward pass of all processes."""
        try:
            self._send(MessageKind.ENCODE, tokens, *_flatten(layout))
            super().encode_together(tokens, layout)
        except Exception as error:
            raise _lost(error) from error

    def _send(self, kind: MessageKind, *tensors: Tensor) -> None:
        assert self.channel is not None
        self.channel.send(kind, [each.cpu() for each in tensors])


def follow_steps(network: Transformer, channel: Channel) -> None:
    """Run what the first process sends, until it ends. Raise LostProcessError if it ends without saying so."""
    kind, tensors = channel.receive()
    if kind == MessageKind.STOP:  # it could not create its engine
        return
    assert kind == MessageKind.PAGES, "the first message announces the pages"
    runner = _create_runner(network, *tensors[0].tolist())
    with torch.inference_mode():
        while True:
            kind, tensors = channel.receive()
            if kind == MessageKind.STOP:
                return
            try:
                _follow(runner, kind, [each.to(network.device) for each in tensors])
            except Exception as error:
                raise _lost(error) from error


def _create_runner(network: Transformer, num_pages: int, page_size: int, has_sources: int) -> Runner:
    parameter, pool = next(network.parameters()), PagePool(num_pages, page_size)
    stack, kind = network.config.output_stack, (parameter.dtype, parameter.device)
    sources = PageStorage.for_sources(stack, PagePool(num_pages, page_size), *kind) if has_sources else None
    return Runner(network, PageStorage.for_stack(stack, pool, *kind), sources)


def _follow(runner: Runner, kind: MessageKind, tensors: Sequence[Tensor]) -> None:
    """Run what one message asks for."""
    match kind:
        case MessageKind.RUN:
            has_prompts, tokens, *parts = tensors
            size = len(_LAYOUT)
            runner.run_together(
                PackedBatch(
                    tokens=tokens,
                    layout=_restore(parts[:size]),
                    source_layout=_restore(parts[size:]) if len(parts) > size else None,
                    sampled_rows=tokens[:0],
                    sampled=[],
                    has_prompts=bool(has_prompts),
                )
            )
        case MessageKind.ENCODE:
            runner.encode_together(tensors[0], _restore(tensors[1:]))
        case MessageKind.COPY:
            sources, destinations = (each.tolist() for each in tensors)
            runner.copy_pages([PageCopy(*pair) for pair in zip(sources, destinations, strict=True)])
        case _:
            assert kind == MessageKind.IDLE, f"a message of the kind {kind} is not expected here"


def _flatten(layout: PackedLayout) -> list[Tensor]:
    """Return the tensors of a layout as rows of numbers."""
    return [getattr(layout, name).flatten() for name in _LAYOUT]


def _restore(parts: Sequence[Tensor]) -> PackedLayout:
    """Return the layout that was flattened."""
    positions, slots, starts, lengths, pages = parts
    return PackedLayout(
        positions=positions,
        slots=slots,
        sequence_starts=starts.int(),
        lengths=lengths.int(),
        page_tables=pages.int().view(len(lengths), len(pages) // len(lengths)),
    )


def _lost(error: Exception) -> LostProcessError:
    """Return an error of one process as the end of all of them."""
    if isinstance(error, LostProcessError):
        return error
    return LostProcessError(
        f"a step failed in one process of the server with {type(error).__name__}, so all of them end; start the server "
        "again, with less memory for keys and values if memory ran out"
    )
