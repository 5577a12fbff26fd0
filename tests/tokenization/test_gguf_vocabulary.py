"""Tokenizers from GGUF metadata, compared with the libraries that the vocabularies come from."""

import json

import numpy
import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer

from clearhead.errors import ClearheadError
from clearhead.tokenization.gguf_vocabulary import tokenizer_from_gguf
from tests.tokenization.samples import byte_level, sentencepiece_model, varied_strings, wordpiece

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
SENTENCEPIECE = {
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
}


def by_id(library: Tokenizer) -> list[str]:
    return sorted(library.get_vocab(), key=library.get_vocab().__getitem__)


def byte_level_metadata(**changes):
    library = byte_level()
    added = library.get_added_tokens_decoder()
    kinds = [
        NORMAL if token_id not in added else CONTROL if added[token_id].special else USER_DEFINED
        for token_id in range(library.get_vocab_size())
    ]
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": by_id(library),
        "token_type": numpy.array(kinds, dtype=numpy.int32),
        "merges": [" ".join(merge) for merge in json.loads(library.to_str())["model"]["merges"]],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "padding_token_id": 0,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


def sentencepiece_metadata(model: bytes, /, **changes):
    pieces = sentencepiece_model_pb2.ModelProto.FromString(model).pieces
    values = {
        "model": "llama",
        "tokens": [piece.piece for piece in pieces],
        "scores": numpy.array([piece.score for piece in pieces], dtype=numpy.float32),
        "token_type": [piece.type for piece in pieces],
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


def test_byte_level_encodes_as_the_library_does():
    tokenizer, library = tokenizer_from_gguf(byte_level_metadata()), byte_level()
    for text in varied_strings(500, seed=6, also=("<|im_end|>", "<think>")):
        assert tokenizer.encode(text) == library.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == library.decode(library.encode(text).ids)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 0)
    assert tokenizer.stop_ids == {0, 2}
    assert tokenizer.special_ids == {0, 1, 2}


def test_a_letter_that_is_a_token_of_its_own_is_decoded_as_text():
    """DeepSeek lists letters such as ü as user-defined tokens; in the alphabet of bytes, ü is byte 252."""
    metadata = byte_level_metadata()
    kinds = metadata["tokenizer.ggml.token_type"]
    letter = metadata["tokenizer.ggml.tokens"].index("ü")
    assert kinds[letter] == NORMAL
    kinds[letter] = USER_DEFINED
    tokenizer = tokenizer_from_gguf(metadata)
    ids = tokenizer.encode("Zürich, Zürich")
    assert ids.count(letter) == 2
    assert tokenizer.decode(ids) == "Zürich, Zürich"


def test_byte_level_bos_and_eos_follow_the_metadata_keys():
    plain = byte_level().encode("fox").ids
    assert tokenizer_from_gguf(byte_level_metadata(add_bos_token=True)).encode("fox") == [1, *plain]
    assert tokenizer_from_gguf(byte_level_metadata(add_bos_token=True, add_eos_token=True)).encode("fox") == [
        1,
        *plain,
        2,
    ]
    assert tokenizer_from_gguf(byte_level_metadata(pre="llama-bpe")).encode("fox")[0] == 1
    assert tokenizer_from_gguf(byte_level_metadata(pre="llama-bpe", add_bos_token=False)).encode("fox") == plain


def test_without_token_types_only_the_named_tokens_are_special():
    tokenizer = tokenizer_from_gguf(byte_level_metadata(token_type=None, padding_token_id=None))
    assert tokenizer.special_ids == {1, 2}


def test_end_of_turn_and_template_are_read():
    metadata = byte_level_metadata(eos_token_id=0, eot_token_id=1)
    metadata["tokenizer.chat_template"] = "{{ messages[0].content }}"
    tokenizer = tokenizer_from_gguf(metadata)
    assert tokenizer.stop_ids == {0, 1, 2}
    assert tokenizer.chat_template == "{{ messages[0].content }}"


@pytest.mark.parametrize("add_dummy_prefix", [True, False])
def test_sentencepiece_encodes_as_sentencepiece_does(add_dummy_prefix):
    model = sentencepiece_model(**SENTENCEPIECE, add_dummy_prefix=add_dummy_prefix)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model)
    ours = tokenizer_from_gguf(sentencepiece_metadata(model, add_space_prefix=None if add_dummy_prefix else False))
    for text in varied_strings(500, seed=7):
        assert ours.encode(text) == [1, *theirs.encode(text)]
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    assert (ours.bos_id, ours.eos_id, ours.unknown_id, ours.stop_ids) == (1, 2, 0, {2})


@pytest.mark.parametrize("rule", ["identity", "nmt_nfkc"])
def test_unigram_encodes_as_sentencepiece_does(rule):
    model = sentencepiece_model(model_type="unigram", normalization_rule_name=rule)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model)
    character_map = sentencepiece_model_pb2.ModelProto.FromString(model).normalizer_spec.precompiled_charsmap
    changes = {"model": "t5", "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    if character_map:
        changes["precompiled_charsmap"] = numpy.frombuffer(character_map, dtype=numpy.int8)
    ours = tokenizer_from_gguf(sentencepiece_metadata(model, **changes))
    texts = varied_strings(300, seed=7)
    assert sum(ours.encode(text) == [*theirs.encode(text), 2] for text in texts) >= 297  # sums of scores may be equal
    framed = tokenizer_from_gguf(sentencepiece_metadata(model, **changes, add_bos_token=True))
    assert framed.encode("lamp") == [1, *ours.encode("lamp")]


def test_a_character_map_must_hold_bytes():
    model = sentencepiece_model(model_type="unigram", normalization_rule_name="identity")
    with pytest.raises(ClearheadError, match="precompiled_charsmap must hold bytes"):
        tokenizer_from_gguf(sentencepiece_metadata(model, model="t5", precompiled_charsmap=[300]))


def test_wordpiece_encodes_as_the_library_does():
    library = wordpiece()
    special = {"[PAD]", "[UNK]", "[CLS]", "[SEP]"}
    tokens = [
        token if token in special else token.removeprefix("##") if token.startswith("##") else f"▁{token}"
        for token in by_id(library)
    ]
    ids = {"bos_token_id": 2, "eos_token_id": 3, "seperator_token_id": 3, "unknown_token_id": 1, "padding_token_id": 0}
    values = {"model": "bert", "tokens": tokens, "token_type": [CONTROL if t in special else NORMAL for t in tokens]}
    tokenizer = tokenizer_from_gguf({f"tokenizer.ggml.{key}": value for key, value in {**values, **ids}.items()})
    for text in varied_strings(300, seed=8):
        assert tokenizer.encode(text) == library.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == library.decode(library.encode(text).ids)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, r"no tokenizer: the key tokenizer\.ggml\.model is missing"),
        ({"model": "gpt3"}, "unknown GGUF tokenizer model 'gpt3'; did you mean 'gpt2'"),
        ({"model": 5}, "model has type int; it must have type str"),
        ({"pre": "gpt-9"}, "unknown pre-tokenizer 'gpt-9'.*known names: .*smollm"),
        ({"tokens": None}, "no vocabulary"),
        ({"tokens": []}, "no vocabulary"),
        ({"tokens": "abc"}, "tokens has type str; it must be an array"),
        ({"tokens": [1, 2]}, "tokens must hold only str values"),
        ({"tokens": ["a", "b", "a"]}, "'a' occurs 2 times"),
        ({"token_type": [1, 1]}, "but 2 token types"),
        ({"token_type": [77] * byte_level().get_vocab_size()}, "a number that is not a token type"),
        ({"merges": ["ab"]}, "'ab' is not two tokens"),
        ({"merges": ["qqq zzz"]}, "merges do not fit its tokens"),
        ({"bos_token_id": 10_000}, "bos_token_id is 10000, but the GGUF file has"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"eos_token_id": "x"}, "eos_token_id has type str"),
        ({"model": "llama"}, "one score for each"),
        ({"model": "llama", "scores": [0.0]}, "one score for each"),
    ],
)
def test_invalid_metadata_is_rejected(changes, message):
    with pytest.raises(ClearheadError, match=message):
        tokenizer_from_gguf(byte_level_metadata(**changes))


def test_a_chat_template_must_be_a_string():
    with pytest.raises(ClearheadError, match="chat_template has type list"):
        tokenizer_from_gguf({**byte_level_metadata(), "tokenizer.chat_template": ["x"]})
