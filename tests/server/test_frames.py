"""Frames arrive as they were sent, however the socket cuts them."""

import asyncio
import socket
from contextlib import asynccontextmanager

from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from clearhead.server.frames import (
    Frame,
    FrameChannel,
    FrameDecoder,
    Kind,
    decode_head,
    decode_scope,
    encode_frame,
    encode_head,
    encode_scope,
)

HEADERS = st.lists(st.tuples(st.binary(), st.binary()))
FRAMES = st.lists(
    st.builds(Frame, kind=st.sampled_from(Kind), number=st.integers(0, 2**64 - 1), content=st.binary(max_size=200))
)


@given(FRAMES, st.lists(st.integers(1, 50), min_size=1))
def test_frames_arrive_as_they_were_sent_in_pieces_of_any_size(frames, sizes):
    data, decoder, found = b"".join(encode_frame(*frame) for frame in frames), FrameDecoder(), []
    while data:
        size = sizes[len(data) % len(sizes)]
        found += decoder.feed(data[:size])
        data = data[size:]
    assert found == frames


def test_a_long_frame_is_joined_in_linear_time():
    """Copying what has arrived for each of these pieces would be 32 GB."""
    content = bytes(64 << 20)
    data, decoder = memoryview(encode_frame(Kind.END, 1, content)), FrameDecoder()
    found = [frame for start in range(0, len(data), 1 << 16) for frame in decoder.feed(data[start : start + (1 << 16)])]
    assert found == [Frame(Kind.END, 1, content)]


@given(
    st.fixed_dictionaries(
        {
            **dict.fromkeys(("http_version", "method", "scheme", "path", "root_path"), st.text()),
            **dict.fromkeys(("raw_path", "query_string"), st.binary()),
            **dict.fromkeys(("client", "server"), st.none() | st.tuples(st.text(), st.integers(0, 65535))),
            "headers": HEADERS,
        }
    )
)
def test_a_scope_arrives_as_it_was(described):
    scope = decode_scope(encode_scope({"type": "http", "state": {"not": "sent"}, **described}))
    assert {name: scope[name] for name in described} == described
    assert scope["state"] == {}
    assert Request(scope).method == described["method"]


@given(st.integers(100, 599), HEADERS)
def test_the_head_of_an_answer_arrives_as_it_was(status, headers):
    assert decode_head(encode_head(status, headers)) == (status, headers)


@asynccontextmanager
async def two_ends(on_data):
    """Yield a channel and the frames that arrive at the other end; on_data gets the pieces as they come."""
    loop, frames = asyncio.get_running_loop(), []
    ended = asyncio.Event()

    class Observed(FrameChannel):
        def data_received(self, data):
            on_data(data)
            super().data_received(data)

    ours, theirs = FrameChannel(frames.append, ended.set), Observed(frames.append, ended.set)
    for channel, end in zip((ours, theirs), socket.socketpair(), strict=True):
        await loop.create_unix_connection(lambda channel=channel: channel, sock=end)
    yield ours, frames
    ours.close()
    await ended.wait()


def test_the_frames_of_one_turn_leave_in_one_packet_and_those_before_a_close_arrive():
    async def send():
        pieces = []
        async with two_ends(pieces.append) as (channel, frames):
            for number in range(256):
                channel.send(Kind.PART, number, b"data: token\n\n")
            while len(frames) < 256:
                await asyncio.sleep(0)
            channel.send(Kind.CUT, 7)
        return pieces, frames

    pieces, frames = asyncio.run(send())
    assert len(pieces) == 2
    assert [frame.number for frame in frames] == [*range(256), 7]
