"""Trained tokenizers: equal to the library's own, loadable by transformers, and errors for invalid arguments."""

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers, trainers
from transformers import AutoTokenizer

from clearhead.errors import ClearheadError
from clearhead.tokenization.characters import character_tokenizer
from clearhead.tokenization.library_tokenizer import SpecialTokens
from clearhead.tokenization.load import load_tokenizer
from clearhead.tokenization.train import train_tokenizer

TEXTS = ["the cat sat on the mat, the hat and the bat", "a cat and a rat that sat", "Höhe über alles?\n  no"] * 5
SIZES = {"bpe": 300, "unigram": 60, "wordpiece": 80, "byte": None, "character": None}
BPE = train_tokenizer(TEXTS, "bpe", 290)
LOSSLESS = ("bpe", "byte", "character")


@pytest.mark.parametrize(("kind", "size"), SIZES.items())
def test_every_kind_respects_its_size_and_loads_again(kind, size, tmp_path):
    tokenizer = train_tokenizer(TEXTS, kind, size)
    assert size is None or tokenizer.vocab_size <= size
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS[:3]:
        ids = tokenizer.encode(text)
        assert loaded.encode(text) == ids == theirs.encode(text)
        if kind in LOSSLESS:
            assert tokenizer.decode(ids) == text
    assert (loaded.eos_id, loaded.unknown_id) == (tokenizer.eos_id, tokenizer.unknown_id)


@settings(deadline=None)
@given(st.text())
def test_bpe_encodes_every_text_without_loss(text):
    assert BPE.decode(BPE.encode(text)) == text


def test_bpe_learns_what_the_library_learns():
    """Compare with the library's byte-level tokenizer, whose built-in pattern is GPT-2's."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=290, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    assert BPE.vocab_size == library.get_vocab_size() == 290
    assert all(BPE.encode(text) == library.encode(text).ids for text in TEXTS)
    assert len(BPE.encode(TEXTS[0])) < len(TEXTS[0]) / 2


def test_wordpiece_adds_the_special_tokens_of_bert():
    tokenizer = train_tokenizer(TEXTS, "wordpiece", 80, extra_tokens=["[MASK]"])
    ids = tokenizer.encode("The cat [MASK]!")
    assert (ids[0], ids[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
    assert tokenizer.token_text(ids[-3]) == "[MASK]"
    assert tokenizer.unknown_id in ids  # the texts contain no !
    assert tokenizer.decode(tokenizer.encode("The CAT")) == "the cat"


def test_unigram_keeps_spaces():
    tokenizer = train_tokenizer(TEXTS, "unigram", 60)
    assert tokenizer.decode(tokenizer.encode("the cat  sat")) == "the cat  sat"
    assert tokenizer.encode("的")[-1] == tokenizer.unknown_id


def test_special_tokens_with_and_without_a_role():
    special = SpecialTokens(bos="<s>", eos="</s>", pad="<pad>")
    tokenizer = train_tokenizer(TEXTS, "bpe", 300, special, ["<extra_id_0>"])
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, 2)
    assert tokenizer.encode("<extra_id_0>") == [3]
    assert tokenizer.special_ids == {0, 1, 2, 3}
    assert tokenizer.stop_ids == {1}


def test_the_character_vocabulary_comes_from_all_texts():
    assert train_tokenizer(TEXTS, "character").encode("Höhe") == character_tokenizer("".join(TEXTS)).encode("Höhe")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], "bpe", 300), "no text to learn a vocabulary from: the corpus is empty"),
        ((["", ""], "character"), "the corpus is empty"),
        (("one text", "character"), "the texts are a single string"),
        ((TEXTS, "bpee", 300), "unknown kind of tokenizer 'bpee'; did you mean 'bpe'"),
        ((TEXTS, "bpe"), "a bpe tokenizer needs a vocab_size"),
        ((TEXTS, "byte", 300), "a byte tokenizer; leave out vocab_size"),
        ((TEXTS, "bpe", 100), "vocab_size is 100; it must be 257 or more"),
        ((TEXTS, "bpe", 0), "vocab_size is 0; it must be from 1 to 4194304"),
        ((TEXTS, "bpe", 2**32), "vocab_size is 4294967296; it must be from 1 to"),
        ((TEXTS, "bpe", 300, None, ["<a>", ""]), "a special token is empty"),
        ((TEXTS, "byte", None, SpecialTokens(eos="")), "a special token is empty"),
        ((["a\ud83d"], "character"), "the characters cannot form a vocabulary"),
        ((TEXTS, "wordpiece", 9), "vocab_size is 9; it must be 31 or more"),
        ((TEXTS, "unigram", 9), "a unigram vocabulary of 9 tokens cannot be learned"),
        ((TEXTS, "unigram", 60, SpecialTokens(eos="</s>")), "a unigram tokenizer needs an unknown token"),
        ((TEXTS, "wordpiece", 60, SpecialTokens(eos="</s>")), "a wordpiece tokenizer needs an unknown token"),
    ],
)
def test_invalid_arguments_are_rejected(arguments, message):
    with pytest.raises(ClearheadError, match=message):
        train_tokenizer(*arguments)
