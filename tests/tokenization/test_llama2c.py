"""llama2.c's tokenizer.bin, compared with the sentencepiece package, and the file of the real stories15M."""

import struct

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from clearhead.errors import ClearheadError
from clearhead.tokenization.llama2c import read_tokenizer_bin
from clearhead.tokenization.load import load_tokenizer
from tests.tokenization.samples import sentencepiece_model, varied_strings

MODEL = sentencepiece_model(
    model_type="bpe", byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False
)
THEIRS = sentencepiece.SentencePieceProcessor(model_proto=MODEL)


def entry(text, score):
    content = text.encode()
    return struct.pack("<fi", score, len(content)) + content


def export_tokenizer_bin():
    """Return the file that llama2.c writes for a SentencePiece model."""
    pieces = [THEIRS.id_to_piece(token_id).replace("▁", " ") for token_id in range(THEIRS.vocab_size())]
    pieces[1:3] = ["\n<s>\n", "\n</s>\n"]
    longest = max(len(piece.encode()) for piece in pieces)
    scores = [THEIRS.get_score(token_id) for token_id in range(THEIRS.vocab_size())]
    return struct.pack("<i", longest) + b"".join(map(entry, pieces, scores))


def test_encodes_and_decodes_as_sentencepiece_does():
    ours = read_tokenizer_bin(export_tokenizer_bin())
    assert (ours.bos_id, ours.eos_id, ours.unknown_id, ours.vocab_size) == (1, 2, 0, THEIRS.vocab_size())
    for text in varied_strings(1000, seed=4):
        assert ours.encode(text) == [1, *THEIRS.encode(text)]
        assert ours.decode(ours.encode(text)) == THEIRS.decode(THEIRS.encode(text))


def test_the_real_file(stories15m):
    tokenizer = load_tokenizer(stories15m.with_name("tokenizer.bin"))
    assert tokenizer.vocab_size == 32_000
    assert tokenizer.encode("Once upon a time") == [1, 9038, 2501, 263, 931]  # llama2.c's own prompt in its tests
    for text in varied_strings(200, seed=5):
        assert tokenizer.decode(tokenizer.encode(text)) == text.replace("▁", " ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has 0 bytes"),
        (struct.pack("<i", 0), "longest token has 0 bytes"),
        (struct.pack("<i", 2**30), "longest token has 1073741824 bytes"),
        (struct.pack("<i", 8), "has 0 tokens"),
        (struct.pack("<i", 8) + entry("123456789", 0.0), "token 0 of tokenizer.bin has 9 bytes"),
        (struct.pack("<ifi", 8, 0.0, -1), "token 0 of tokenizer.bin has -1 bytes"),
        (struct.pack("<i", 8) + entry("abc", 0.0)[:-1], "truncated in token 0"),
        (export_tokenizer_bin()[:-1], "truncated in token"),
        (export_tokenizer_bin() + b"\0" * 5, "truncated in token"),
        (export_tokenizer_bin() + entry(" the", -1.0), "occurs 2 times"),
        (export_tokenizer_bin() + struct.pack("<fi", 0.0, 1) + b"\xff", "is not UTF-8"),
    ],
)
def test_invalid_files_are_rejected(content, message):
    with pytest.raises(ClearheadError, match=message):
        read_tokenizer_bin(content)


@given(st.binary(max_size=200))
def test_random_bytes_are_rejected(content):
    with pytest.raises(ClearheadError):
        read_tokenizer_bin(content)
