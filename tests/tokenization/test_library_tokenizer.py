"""LibraryTokenizer: ids, special tokens, display and saving."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer

from clearhead.errors import ClearheadError
from clearhead.tokenization.library_tokenizer import LibraryTokenizer, SpecialTokens, set_framing_tokens
from clearhead.tokenization.load import load_tokenizer
from tests.tokenization.samples import LIBRARY_TOKENIZERS, byte_fallback, byte_level, varied_strings, wordpiece

SPECIAL = {
    "byte level": SpecialTokens(bos="<|im_start|>", eos="<|im_end|>", pad="<|endoftext|>"),
    "byte fallback": SpecialTokens(bos="<s>", eos="</s>", unknown="<unk>"),
    "metaspace": SpecialTokens(eos="</s>", pad="<pad>", unknown="<unk>"),
    "wordpiece": SpecialTokens(pad="[PAD]", unknown="[UNK]", stops=("[SEP]",)),
    "word ends": SpecialTokens(unknown="<unk>"),
}


def copy_tokenizer(library):
    return Tokenizer.from_str(library.to_str())


@pytest.mark.parametrize("kind", sorted(SPECIAL))
def test_encodes_as_the_library_does(kind):
    library = copy_tokenizer(LIBRARY_TOKENIZERS[kind]())
    tokenizer = LibraryTokenizer(LIBRARY_TOKENIZERS[kind](), SPECIAL[kind])
    for text in varied_strings(300, also=("<|im_end|>", "</s>", "[SEP]", "<think>")):
        assert tokenizer.encode(text) == library.encode(text).ids
        assert tokenizer.encode(text, add_special_tokens=False) == library.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", sorted(SPECIAL))
def test_a_saved_tokenizer_loads_here_and_in_transformers(kind, tmp_path):
    tokenizer = LibraryTokenizer(LIBRARY_TOKENIZERS[kind](), SPECIAL[kind], chat_template="{{ messages }}")
    tokenizer.save(tmp_path / "new" / "folder")
    again, theirs = (load(tmp_path / "new" / "folder") for load in (load_tokenizer, AutoTokenizer.from_pretrained))
    for text in varied_strings(200):
        assert again.encode(text) == theirs.encode(text) == tokenizer.encode(text)
    for name in ("vocab_size", "bos_id", "eos_id", "pad_id", "unknown_id", "stop_ids", "special_ids", "chat_template"):
        assert getattr(again, name) == getattr(tokenizer, name), name
    assert (theirs.bos_token_id, theirs.eos_token_id) == (tokenizer.bos_id, tokenizer.eos_id)
    assert (theirs.pad_token_id, theirs.unk_token_id) == (tokenizer.pad_id, tokenizer.unknown_id)
    assert theirs.chat_template == "{{ messages }}"


def test_special_and_stop_ids():
    tokenizer = LibraryTokenizer(byte_level(), SPECIAL["byte level"])
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.stop_ids == {0, 2}  # end of text and end of turn
    assert tokenizer.decode(tokenizer.encode("<|im_start|>a<think>b<call ✓><|im_end|>")) == "a<think>b<call ✓>"
    stopping = LibraryTokenizer(wordpiece(), SPECIAL["wordpiece"])
    assert stopping.stop_ids == {stopping.encode("")[-1]}


@pytest.mark.parametrize(
    ("kind", "token", "text"),
    [
        ("byte level", "Ġthe", " the"),
        ("byte level", "Ċ", "\n"),
        ("byte level", "Ã", "\\xc3"),
        ("byte level", "<|im_end|>", "<|im_end|>"),
        ("byte fallback", "▁", " "),
        ("byte fallback", "<0x41>", "A"),
        ("byte fallback", "<0xE4>", "\\xe4"),
        ("byte fallback", "</s>", "</s>"),
        ("metaspace", "▁the", " the"),
        ("wordpiece", "the", " the"),
        ("wordpiece", "##ing", "ing"),
        ("wordpiece", "[SEP]", "[SEP]"),
    ],
)
def test_tokens_are_shown_readably(kind, token, text):
    tokenizer = LibraryTokenizer(LIBRARY_TOKENIZERS[kind](), SPECIAL[kind])
    assert tokenizer.token_text(LIBRARY_TOKENIZERS[kind]().token_to_id(token)) == text


def test_ids_without_a_token_have_no_text():
    tokenizer = LibraryTokenizer(byte_level(), SPECIAL["byte level"])
    spare = tokenizer.vocab_size + 7
    assert tokenizer.decode([spare, *tokenizer.encode("fox"), spare, -1]) == "fox"
    assert tokenizer.token_text(spare) == f"<{spare}>"


def test_truncation_and_padding_of_the_file_are_ignored():
    library = copy_tokenizer(wordpiece())
    library.enable_truncation(max_length=4)
    library.enable_padding(length=128)
    assert len(library.encode("the lazy dog and the quick fox").ids) == 128
    tokenizer = LibraryTokenizer(library, SpecialTokens())
    assert (
        tokenizer.encode("the lazy dog and the quick fox") == wordpiece().encode("the lazy dog and the quick fox").ids
    )


@pytest.mark.parametrize(("first", "last"), [("<s>", None), (None, "</s>"), ("<s>", "</s>"), (None, None)])
def test_framing_tokens_are_added_around_a_text(first, last):
    library = copy_tokenizer(byte_fallback())
    set_framing_tokens(library, first, last)
    plain = library.encode("fox", add_special_tokens=False).ids
    assert library.encode("fox").ids == [*([1] if first else []), *plain, *([2] if last else [])]


def test_a_framing_token_may_contain_any_characters():
    names = ["a b", "x:1", "$A", "<|b:0|>", "日本 "]
    for name in names:
        library = Tokenizer(models.BPE({name: 0, "q": 1}, []))
        set_framing_tokens(library, name, None)
        assert library.encode("q").ids == [0, 1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: LibraryTokenizer(byte_level(), SpecialTokens(eos="<nowhere>")),
            "'<nowhere>' is not in the vocabulary",
        ),
        (
            lambda: LibraryTokenizer(Tokenizer(models.BPE({"a": 0, "b": 2**31}, [])), SpecialTokens()),
            "largest id is 2147483648",
        ),
        (lambda: LibraryTokenizer(byte_level(), SpecialTokens()).encode("a\ud800"), "cannot be encoded"),
        (
            lambda: LibraryTokenizer(Tokenizer(models.WordPiece({"a": 0}, unk_token="[UNK]")), SpecialTokens()).encode(
                "b"
            ),
            "b",
        ),
    ],
)
def test_invalid_vocabularies_and_texts_are_rejected(make, message):
    with pytest.raises(ClearheadError, match=message):
        make()


def test_decoders_for_speech_are_rejected():
    library = Tokenizer(models.BPE({"a": 0}, []))
    library.decoder = decoders.CTC()
    with pytest.raises(ClearheadError, match="speech"):
        LibraryTokenizer(library, SpecialTokens())


def test_the_saved_config_omits_absent_values(tmp_path):
    LibraryTokenizer(byte_level(), SpecialTokens(eos="<|im_end|>")).save(tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text()) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
    }
