"""How text is cut before merging, against the library's own ways to cut and against tiktoken's patterns."""

import pytest
import tiktoken
from tiktoken_ext import openai_public
from tokenizers import Regex, pre_tokenizers

from clearhead.errors import ClearheadError
from clearhead.tokenization.byte_level import BYTE_ALPHABET, from_byte_alphabet, in_byte_alphabet, merges_by_rank
from clearhead.tokenization.splits import GGUF_SPLITS, TIKTOKEN_SPLITS, gguf_split, tiktoken_split
from clearhead.tokenization.tiktoken import SPECIAL_TOKENS
from tests.tokenization.samples import varied_strings

STRINGS = varied_strings(1000, seed=1)
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
DIGITS_THEN_BYTE_LEVEL = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTE_LEVEL])


def cuts(pre_tokenizer, text):
    return [place for _, place in pre_tokenizer.pre_tokenize_str(text)]


def by_patterns(patterns):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns])


@pytest.mark.parametrize(("name", "theirs"), [("gpt-2", BYTE_LEVEL), ("smollm", DIGITS_THEN_BYTE_LEVEL)])
def test_cuts_are_those_of_the_published_pre_tokenizer(name, theirs):
    ours = by_patterns(gguf_split(name).patterns)
    for text in STRINGS:
        assert cuts(ours, text) == cuts(theirs, text)


@pytest.mark.parametrize("name", sorted(GGUF_SPLITS))
def test_every_pattern_is_valid_and_loses_nothing(name):
    pre_tokenizer = by_patterns(GGUF_SPLITS[name].patterns)
    for text in STRINGS[:200]:
        assert "".join(piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)) == text


@pytest.mark.parametrize("name", sorted(TIKTOKEN_SPLITS))
def test_tiktoken_patterns_and_special_tokens_are_openais(name, monkeypatch):
    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: {})  # it would download ranks
    published = openai_public.ENCODING_CONSTRUCTORS[f"{name}_base"]()
    assert SPECIAL_TOKENS[name] == published["special_tokens"]
    # With the 256 bytes and every two-byte join as ranks, tokens tell where tiktoken has cut.
    ranks = {bytes([byte]): byte for byte in range(256)}
    ranks |= {bytes([a, b]): 256 + 256 * a + b for a in range(256) for b in range(256)}
    theirs = tiktoken.Encoding(name, pat_str=published["pat_str"], mergeable_ranks=ranks, special_tokens={})
    ours = by_patterns([tiktoken_split(name)])
    for text in STRINGS:
        pieces = [piece.encode() for piece, _ in ours.pre_tokenize_str(text)]
        assert theirs.encode(text) == [token for piece in pieces for token in theirs._encode_single_piece(piece)]


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(ClearheadError, match=r"unknown pre-tokenizer 'gpt-5'.*known are: .*gpt-2.*smollm"):
        gguf_split("gpt-5")
    with pytest.raises(ClearheadError, match="did you mean 'cl100k'"):
        tiktoken_split("cl100")


def test_the_byte_alphabet_is_the_librarys():
    assert set(BYTE_ALPHABET) == set(pre_tokenizers.ByteLevel.alphabet())
    for text in STRINGS:
        spelled = "".join(piece for piece, _ in BYTE_LEVEL.pre_tokenize_str(text))
        assert in_byte_alphabet(text.encode()) == spelled
        assert from_byte_alphabet(spelled) == text.encode()


def test_merges_come_in_the_order_of_what_they_build():
    assert merges_by_rank(["a", "b", "ab", "aa", "aab"]) == [("a", "b"), ("a", "a"), ("a", "ab"), ("aa", "b")]
