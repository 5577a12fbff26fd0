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


def pieces_of(text, stop=(), ends_with_stop_token=False, visible=None, num_together=1):
    """Return the pieces of a text that arrives byte by byte, or several bytes together."""
    ids = [*text.encode(), *([TOKENIZER.eos_id] if ends_with_stop_token else [])]
    options = SamplingOptions(max_new_tokens=max(len(ids), 1), stop=stop, stop_ids=[TOKENIZER.eos_id])
    choice = Choice(0, Request(prompt=[1], options=options), TOKENIZER, visible=visible)
    last = "stop" if ends_with_stop_token else "length"
    events = [Event(0, token, finish_reason=last if n == len(ids) else None) for n, token in enumerate(ids, start=1)]
    pieces = []
    for start in range(0, len(events), num_together):
        pieces.append(choice.push(events[start : start + num_together]))
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


@settings(max_examples=200, deadline=None)
@given(TEXTS, STOPS, st.booleans(), st.booleans(), st.integers(2, 5))
def test_events_that_are_pushed_together_give_the_same_text(text, stops, ends_with_stop_token, shows_end, num_together):
    visible = {TOKENIZER.eos_id: "<end>"} if shows_end else None
    alone, together = (pieces_of(text, stops, ends_with_stop_token, visible, count) for count in (1, num_together))
    assert "".join(piece.text for piece in together) == "".join(piece.text for piece in alone)
    assert [piece.finish_reason for piece in together][-1:] == [piece.finish_reason for piece in alone][-1:]
