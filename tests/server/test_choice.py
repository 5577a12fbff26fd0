"""The text of a choice: stop strings and characters that are split over tokens, for any split."""

from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.engine import Event, Request
from clearhead.options import SamplingOptions
from clearhead.server.choice import Choice
from clearhead.tokenization import byte_tokenizer

TOKENIZER = byte_tokenizer()
TEXTS = st.text(st.sampled_from("abcé€😀 ñ"), max_size=12)
STOPS = st.lists(st.text(st.sampled_from("abé€"), min_size=1, max_size=3), max_size=3)


def pieces_of(text, stop=(), ends_with_stop_token=False):
    """Return the pieces of a text that arrives byte by byte."""
    ids = [*text.encode(), *([TOKENIZER.eos_id] if ends_with_stop_token else [])]
    options = SamplingOptions(max_new_tokens=max(len(ids), 1), stop=stop, stop_ids=[TOKENIZER.eos_id])
    choice = Choice(0, Request(prompt=[1], options=options), TOKENIZER)
    pieces = []
    for number, token in enumerate(ids, start=1):
        is_last = number == len(ids)
        reason = ("stop" if ends_with_stop_token else "length") if is_last else None
        pieces.append(choice.push(Event(0, token, finish_reason=reason)))
        if pieces[-1].finish_reason is not None:
            break
    return pieces


@settings(max_examples=200, deadline=None)
@given(TEXTS, STOPS, st.booleans())
def test_pieces_join_to_the_text_up_to_the_first_stop_string(text, stops, ends_with_stop_token):
    pieces = pieces_of(text, stops, ends_with_stop_token)
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    joined = "".join(piece.text for piece in pieces)
    if ends:
        found = [stop for stop in stops if text[: min(ends)].endswith(stop)]
        assert joined == text[: min(ends) - max(map(len, found))]
        assert pieces[-1].finish_reason == "stop"
    else:
        assert joined == text
    assert "�" not in joined
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * len(pieces[:-1])
    sent = ""
    for piece in pieces:  # nothing that was sent is ever part of a stop string
        sent += piece.text
        assert not any(stop in sent for stop in stops)
