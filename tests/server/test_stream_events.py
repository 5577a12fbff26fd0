"""Server-sent events by template: the same bytes as the JSON of each event, and the frames that h11 makes."""

from dataclasses import replace

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.server.answers import AnswerHead
from clearhead.server.chat import ChatFormat
from clearhead.server.choice import Piece
from clearhead.server.completions import CompletionFormat
from clearhead.server.fields import ChatFields, CompletionFields
from clearhead.server.job import Usage
from clearhead.server.protocol import chunk_of_body
from clearhead.server.responses import ResponseFields, ResponseFormat
from clearhead.server.stream_events import EventEncoder, encode_event

FORMATS = {"completion": CompletionFormat, "chat": ChatFormat, "response": ResponseFormat}
FIELDS = {
    "completion": lambda **given: CompletionFields(model=None, options={}, prompts=[], **given),
    "chat": lambda **given: ChatFields(model=None, options={}, messages=[], **given),
    "response": lambda **given: ResponseFields(model=None, options={"temperature": 1.0}, messages=[], given={}),
}
PIECES = st.lists(
    st.builds(
        Piece,
        st.integers(0, 1),
        st.text() | st.sampled_from(["", '"', "\\", "\n", "\ue000text\ue000", "\u2028", "\ud800"]),
        finish_reason=st.sampled_from([None, None, None, "stop", "length"]),
    ),
    max_size=8,
)


def make_format(kind, model="toy", **given):
    form = FORMATS[kind](AnswerHead("id-1", 7, model, "fp_1"), FIELDS[kind](**given))
    if kind == "response":
        form._message_id = "msg-1"
    return form


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("model", ["toy", "a \ue000text\ue000"])
@settings(max_examples=60, deadline=None)
@given(pieces=PIECES, include_usage=st.booleans(), continuous=st.booleans())
def test_a_template_gives_the_bytes_of_the_json(kind, model, pieces, include_usage, continuous):
    if kind == "response":
        pieces = [replace(piece, index=0) for piece in pieces]
    given = {"include_usage": include_usage, "continuous_usage": include_usage and continuous}
    usages = [Usage(3, number, 0) for number in range(len(pieces))]
    expected_form, counter = make_format(kind, model, **given), iter(range(len(pieces)))
    chunks = [expected_form.chunks(piece, usage) for piece, usage in zip(pieces, usages, strict=True)]
    expected = [b"".join(map(encode_event, each)) for each in chunks]
    current = [0]
    encoder = EventEncoder(make_format(kind, model, **given), lambda: usages[current[0]])
    found = []
    for number, piece in zip(counter, pieces, strict=True):
        current[0] = number
        found.append(encoder.encode([piece]))
    assert found == expected


@pytest.mark.parametrize("kind", ["completion", "chat"])
@pytest.mark.parametrize("usage", [False, True])
def test_most_events_need_no_json(kind, usage, monkeypatch):
    form = make_format(kind, include_usage=usage, continuous_usage=usage)
    encoder = EventEncoder(form, lambda: Usage(1, 1, 0))
    encoder.encode([Piece(0, "a")])
    monkeypatch.setattr(form, "chunks", None)
    assert b'"b"' in encoder.encode([Piece(0, "b")])


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("content", [b"x", b"data: {}\n\n" * 100])
def test_a_chunk_is_what_h11_sends(version, content):
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(f"GET / HTTP/{version}\r\nHost: x\r\n\r\n".encode())
    connection.next_event()
    connection.send(h11.Response(status_code=200, headers=[]))
    assert chunk_of_body(content, connection.their_http_version) == connection.send(h11.Data(data=content))
