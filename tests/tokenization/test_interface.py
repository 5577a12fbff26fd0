"""Streams of ids: the pieces are whole characters and concatenate to the text that the library decodes."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.tokenization.characters import byte_tokenizer
from clearhead.tokenization.interface import StreamDecoder
from clearhead.tokenization.library_tokenizer import LibraryTokenizer, SpecialTokens
from tests.tokenization.samples import LIBRARY_TOKENIZERS, varied_strings

KINDS = sorted(LIBRARY_TOKENIZERS)
TOKENIZERS = {kind: LibraryTokenizer(LIBRARY_TOKENIZERS[kind](), SpecialTokens()) for kind in KINDS}
INCOMPLETE = "👍".encode()[:3]


def decode_stream(tokenizer, ids, skip_special_tokens=True):
    decoder = StreamDecoder(tokenizer, skip_special_tokens)
    return [decoder.push(token_id) for token_id in ids] + [decoder.finish()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip_special_tokens", [True, False])
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_random_ids_stream_to_what_the_library_decodes(kind, skip_special_tokens, data):
    tokenizer, library = TOKENIZERS[kind], LIBRARY_TOKENIZERS[kind]()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 5), max_size=30))
    text = "".join(decode_stream(tokenizer, ids, skip_special_tokens))
    assert text == tokenizer.decode(ids, skip_special_tokens)
    whole = library.decode(ids, skip_special_tokens=skip_special_tokens)
    # One invalid byte makes the library discard the whole run of byte tokens; the stream keeps the valid ones.
    assert text == whole or (kind == "byte fallback" and "\ufffd" in whole)


@pytest.mark.parametrize("kind", KINDS)
def test_real_texts_stream_to_what_the_library_decodes(kind):
    tokenizer, library = TOKENIZERS[kind], LIBRARY_TOKENIZERS[kind]()
    for text in varied_strings(300):
        ids = tokenizer.encode(text)
        pieces = decode_stream(tokenizer, ids)
        assert "".join(pieces) == library.decode(ids)
        assert "\ufffd" not in "".join(pieces) or "\ufffd" in text


@pytest.mark.parametrize("kind", ["byte fallback", "byte level"])
def test_a_character_is_returned_once_it_is_complete(kind):
    ids = LIBRARY_TOKENIZERS[kind]().encode("🦊", add_special_tokens=False).ids
    assert len(ids) >= 3
    assert decode_stream(TOKENIZERS[kind], ids) == [*[""] * (len(ids) - 1), "🦊", ""]


def test_a_leading_space_is_dropped_only_at_the_start_of_a_text():
    tokenizer, library = TOKENIZERS["byte fallback"], LIBRARY_TOKENIZERS["byte fallback"]()
    for first in ("<0x20>", "▁"):
        ids = [library.token_to_id(token) for token in (first, "▁", "<0x20>", "<0x41>")]
        assert tokenizer.decode(ids) == library.decode(ids) == "  A"


def test_an_invalid_character_does_not_affect_its_neighbors():
    tokenizer = TOKENIZERS["byte fallback"]
    byte = tokenizer._library.token_to_id
    valid = [byte(f"<0x{value:02X}>") for value in "你".encode()]
    ids = [*valid, byte("<0xF0>"), byte("<0x9F>"), byte("<0x41>"), *valid, byte("<0xE4>")]
    assert tokenizer.decode(ids) == "你\ufffdA你\ufffd"
    assert decode_stream(tokenizer, ids) == ["", "", "你", "", "", "\ufffdA", "", "", "你", "", "\ufffd"]


@given(st.binary(max_size=40))
def test_bytes_are_decoded_as_python_decodes_them(content):
    assert "".join(decode_stream(byte_tokenizer(), content)) == content.decode("utf-8", "replace")


def test_finish_starts_a_new_text():
    tokenizer = TOKENIZERS["byte fallback"]
    decoder = StreamDecoder(tokenizer)
    ids = tokenizer.encode("The fox")
    first = "".join(map(decoder.push, ids)) + decoder.finish()
    assert "".join(map(decoder.push, ids)) + decoder.finish() == first == "The fox"

    byte_decoder = StreamDecoder(byte_tokenizer())
    assert [byte_decoder.push(byte) for byte in INCOMPLETE] == ["", "", ""]
    assert byte_decoder.finish() == "\ufffd"
    assert byte_decoder.push(ord("a")) == "a"


def test_each_token_is_decoded_once():
    tokenizer = byte_tokenizer()
    previous_ids = []

    class Counting:
        special_ids, vocab_size = tokenizer.special_ids, tokenizer.vocab_size

        def token_bytes(self, token_id, previous_id):
            previous_ids.append(previous_id)
            return tokenizer.token_bytes(token_id, previous_id)

    decode_stream(Counting(), [0x80] * 500)
    assert len(previous_ids) == 500


def test_importing_the_interface_imports_no_large_library():
    large = {"torch", "tokenizers", "jinja2", "numpy"}
    code = f"import clearhead.tokenization.interface, sys; print({large} & {{*sys.modules}})"
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert completed.stdout.strip() == "set()"
