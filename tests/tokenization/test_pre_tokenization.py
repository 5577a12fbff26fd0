"""Patterns that split text before merging, compared with the library's pre-tokenizers and with tiktoken's patterns."""

import pytest
import tiktoken
from tiktoken_ext import openai_public
from tokenizers import Regex, pre_tokenizers

from clearhead.errors import ClearheadError
from clearhead.tokenization.byte_level import BYTE_ALPHABET, from_byte_alphabet, merges_by_rank, to_byte_alphabet
from clearhead.tokenization.pre_tokenization import (
    GGUF_PRE_TOKENIZATIONS,
    TIKTOKEN_PATTERNS,
    gguf_pre_tokenization,
    tiktoken_pattern,
)
from clearhead.tokenization.tiktoken import SPECIAL_TOKENS
from tests.tokenization.samples import varied_strings

STRINGS = varied_strings(1000, seed=1)
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
DIGITS_THEN_BYTE_LEVEL = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTE_LEVEL])


def spans(pre_tokenizer, text):
    return [span for _, span in pre_tokenizer.pre_tokenize_str(text)]


def split_by(patterns):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns])


@pytest.mark.parametrize(("name", "theirs"), [("gpt-2", BYTE_LEVEL), ("smollm", DIGITS_THEN_BYTE_LEVEL)])
def test_splits_equal_those_of_the_published_pre_tokenizer(name, theirs):
    ours = split_by(gguf_pre_tokenization(name).patterns)
    for text in STRINGS:
        assert spans(ours, text) == spans(theirs, text)


@pytest.mark.parametrize("name", sorted(GGUF_PRE_TOKENIZATIONS))
def test_every_pattern_is_valid_and_loses_nothing(name):
    pre_tokenizer = split_by(GGUF_PRE_TOKENIZATIONS[name].patterns)
    for text in STRINGS[:200]:
        assert "".join(piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)) == text


@pytest.mark.parametrize("name", sorted(TIKTOKEN_PATTERNS))
def test_tiktoken_patterns_and_special_tokens_equal_openais(name, monkeypatch):
    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: {})  # it would download ranks
    published = openai_public.ENCODING_CONSTRUCTORS[f"{name}_base"]()
    assert SPECIAL_TOKENS[name] == published["special_tokens"]
    # With the 256 bytes and all pairs of bytes as ranks, the tokens reveal where tiktoken splits.
    ranks = {bytes([byte]): byte for byte in range(256)}
    ranks |= {bytes([a, b]): 256 + 256 * a + b for a in range(256) for b in range(256)}
    theirs = tiktoken.Encoding(name, pat_str=published["pat_str"], mergeable_ranks=ranks, special_tokens={})
    ours = split_by([tiktoken_pattern(name)])
    for text in STRINGS:
        pieces = [piece.encode() for piece, _ in ours.pre_tokenize_str(text)]
        assert theirs.encode(text) == [token for piece in pieces for token in theirs._encode_single_piece(piece)]


def test_unknown_names_are_rejected_with_a_list_of_known_ones():
    with pytest.raises(ClearheadError, match=r"unknown pre-tokenizer 'gpt-5'.*known names: .*gpt-2.*smollm"):
        gguf_pre_tokenization("gpt-5")
    with pytest.raises(ClearheadError, match="did you mean 'cl100k'"):
        tiktoken_pattern("cl100")


def test_the_byte_alphabet_equals_the_librarys():
    assert set(BYTE_ALPHABET) == set(pre_tokenizers.ByteLevel.alphabet())
    for text in STRINGS:
        spelled = "".join(piece for piece, _ in BYTE_LEVEL.pre_tokenize_str(text))
        assert to_byte_alphabet(text.encode()) == spelled
        assert from_byte_alphabet(spelled) == text.encode()


def test_merges_are_in_the_order_of_the_tokens_they_build():
    assert merges_by_rank(["a", "b", "ab", "aa", "aab"]) == [("a", "b"), ("a", "a"), ("a", "ab"), ("aa", "b")]
