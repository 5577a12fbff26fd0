"""Tokenizers with one token per byte or per character."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.errors import ClearheadError
from clearhead.tokenization.characters import byte_tokenizer, character_tokenizer
from clearhead.tokenization.library_tokenizer import SpecialTokens
from clearhead.tokenization.load import load_tokenizer

BYTES = byte_tokenizer()


@given(st.text())
def test_bytes_are_those_of_utf8_and_decode_to_the_text(text):
    ids = BYTES.encode(text)
    assert ids == list(text.encode())
    assert BYTES.decode(ids) == text


def test_special_tokens_follow_the_bytes():
    tokenizer = byte_tokenizer(SpecialTokens(bos="<bos>", eos="<eos>", pad="<pad>"))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size) == (256, 257, 258, 259)
    assert tokenizer.special_ids == {256, 257, 258}
    assert tokenizer.stop_ids == {257}
    assert tokenizer.encode("a<eos>") == [97, 257]
    assert tokenizer.decode([256, 97, 257]) == "a"
    assert tokenizer.decode([256, 97, 257], skip_special_tokens=False) == "<bos>a<eos>"


def test_characters_are_numbered_in_sorted_order():
    tokenizer = character_tokenizer("to be or not to be")
    assert tokenizer.vocab_size == len(set("to be or not to be")) + 1
    assert [tokenizer.token_text(token_id) for token_id in range(tokenizer.vocab_size)] == [
        *sorted(set("to be or not to be")),
        "<|unknown|>",
    ]
    assert tokenizer.encode("bet?") == [1, 2, 6, 7]
    assert tokenizer.unknown_id == 7
    assert tokenizer.decode([1, 2, 6, 7]) == "bet"


@given(st.text(min_size=1, alphabet="abcdé你👍 \n\t"))
def test_known_characters_decode_to_the_text(text):
    tokenizer = character_tokenizer("abcdé你👍 \n\t")
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(text)) == len(text)


@pytest.mark.parametrize("tokenizer", [BYTES, character_tokenizer("abc é你\n")], ids=["byte", "character"])
def test_a_saved_tokenizer_loads_here_and_in_transformers(tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer.save(tmp_path)
    again, theirs = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("abc", "é你 x\n\nb", "", "a<|endoftext|>b <|unknown|>"):
        assert again.encode(text) == theirs.encode(text) == tokenizer.encode(text)
        assert again.decode(again.encode(text)) == tokenizer.decode(tokenizer.encode(text))
    assert (again.eos_id, again.unknown_id, again.vocab_size) == (
        tokenizer.eos_id,
        tokenizer.unknown_id,
        tokenizer.vocab_size,
    )
    assert (theirs.eos_token_id, theirs.unk_token_id) == (tokenizer.eos_id, tokenizer.unknown_id)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: character_tokenizer("abc", SpecialTokens(eos="<eos>")), "needs an unknown token"),
        (lambda: character_tokenizer(["ab", "c"]), "must be a single character"),
        (lambda: character_tokenizer("abc", SpecialTokens(unknown="a")), "also a character"),
    ],
)
def test_invalid_arguments_are_rejected(make, message):
    with pytest.raises(ClearheadError, match=message):
        make()
