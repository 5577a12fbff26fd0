"""Rank files compared with the tiktoken package."""

import base64

import pytest
import tiktoken
from tiktoken_ext import openai_public

from clearhead.errors import ClearheadError
from clearhead.tokenization.byte_level import from_byte_alphabet
from clearhead.tokenization.load import load_tokenizer
from clearhead.tokenization.pre_tokenization import TIKTOKEN_PATTERNS
from clearhead.tokenization.tiktoken import read_rank_file
from tests.tokenization.samples import byte_level, varied_strings


def learned_ranks():
    """Return ranks from a trained byte-level vocabulary without its special tokens."""
    tokens = sorted(byte_level().get_vocab(with_added_tokens=False).items(), key=lambda item: item[1])
    return {from_byte_alphabet(token): rank for rank, (token, _) in enumerate(tokens[3:])}


# The last token cannot be built from two others, so only a whole word can become it.
RANKS = {**learned_ranks(), b"qzxj": 690}


def rank_file(ranks):
    return b"\n".join(base64.b64encode(token) + b" %d" % rank for token, rank in ranks.items()) + b"\n"


@pytest.mark.parametrize("name", sorted(TIKTOKEN_PATTERNS))
def test_encodes_as_tiktoken_does(name, monkeypatch):
    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: {})  # it would download ranks
    pattern = openai_public.ENCODING_CONSTRUCTORS[f"{name}_base"]()["pat_str"]
    special = {"<|endoftext|>": 700, "<|fim|>": 702}
    theirs = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=RANKS, special_tokens=special)
    ours = read_rank_file(rank_file(RANKS), encoding=name, special_tokens=special)
    for text in [*varied_strings(1000, seed=2, also=("<|endoftext|>", "<|fim|>")), "qzxj", "qzxjq"]:
        ids = theirs.encode(text, allowed_special="all")
        assert ours.encode(text) == ids
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    assert (ours.vocab_size, ours.eos_id, ours.special_ids) == (703, 700, {700, 702})


def test_the_file_name_selects_the_encoding(tmp_path):
    (tmp_path / "r50k_base.tiktoken").write_bytes(rank_file({**RANKS, b"filler": 49_000}))
    with pytest.raises(ClearheadError, match="but its largest id is 50256"):
        load_tokenizer(tmp_path)  # its <|endoftext|> is far beyond these few ranks
    (tmp_path / "r50k_base.tiktoken").rename(tmp_path / "mine.tiktoken")
    with pytest.raises(ClearheadError, match=r"mine\.tiktoken cannot be loaded: unknown tiktoken encoding 'mine'"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no token for byte 0x00"),
        (rank_file({**RANKS, b"!!": 5}), "same rank"),
        (rank_file(RANKS)[:-9], "base64 token and its rank"),
        (b"!!!! 5\n", "line 1 of the tiktoken file"),
        (b"QQ== 5 6\n", "line 1 of the tiktoken file"),
        (b"QQ== 1\n\nQQ== 2\n", "line 3 of the tiktoken file repeats a token"),
        (b"QQ== -1\n", "rank out of range"),
        (b"QQ== 99999999999\n", "rank out of range"),
        (base64.b64encode(bytes(9000)) + b" 1\n", "a token of 9000 bytes"),
        (rank_file({token: rank for token, rank in RANKS.items() if token != b"\xff"}), "no token for byte 0xff"),
        (rank_file({**RANKS, b"zzzz": 50_256}), r"overlap: \[50256\]"),
    ],
)
def test_invalid_files_are_rejected(content, message):
    with pytest.raises(ClearheadError, match=message):
        read_rank_file(content, encoding="r50k")
