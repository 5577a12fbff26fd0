"""SentencePiece models compared with the sentencepiece package that trained them."""

from contextlib import suppress

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2

from clearhead.errors import ClearheadError
from clearhead.tokenization.character_map import CharacterMap
from clearhead.tokenization.load import load_tokenizer
from clearhead.tokenization.sentencepiece import build_sentencepiece_tokenizer
from clearhead.tokenization.sentencepiece_file import read_sentencepiece_model
from tests.tokenization.samples import CORPUS, SENTENCES, sentencepiece_model, varied_strings

SYMBOLS = ("<sep>", "<SEP>", "▁▁▁▁")
OPTIONS = {
    "bpe as Llama": {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
    },
    "bpe with symbols": {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "user_defined_symbols": ",".join(SYMBOLS),
    },
    "bpe by default": {"model_type": "bpe"},
    "bpe without prefix": {"model_type": "bpe", "add_dummy_prefix": False, "remove_extra_whitespaces": False},
    "bpe folding case": {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "nfkc_cf",
        "user_defined_symbols": ",".join(SYMBOLS),
    },
    "unigram as T5": {"model_type": "unigram", "bos_id": -1, "eos_id": 1, "unk_id": 2, "pad_id": 0},
    "unigram with bytes": {
        "model_type": "unigram",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "user_defined_symbols": ",".join(SYMBOLS),
    },
    "unigram folding case": {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc_cf"},
}
STRINGS = varied_strings(1000, seed=3, also=(*SYMBOLS, "<0x41>", "<0xE4>"))
# Strings in which a symbol of spaces competes with pieces that start with a space
STRINGS += [f"x▁▁▁▁{word}" for word in sorted(set(" ".join(CORPUS).split()))]


def load_both(name):
    """Return the tokenizer of the sentencepiece package, and ours."""
    content = sentencepiece_model(**OPTIONS[name])
    vocabulary, special = read_sentencepiece_model(content)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=content)
    return theirs, build_sentencepiece_tokenizer(vocabulary, special, adds_bos=False)


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_encodes_as_sentencepiece_does(name):
    theirs, ours = load_both(name)
    for text in [*STRINGS, *SENTENCES]:
        expected, found = theirs.encode(text), ours.encode(text)
        if OPTIONS[name]["model_type"] == "unigram":  # the two may differ if sums of scores are equal
            assert sorted(found) == sorted(expected), text
        else:
            assert found == expected, text


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_unigram_segmentations_differ_only_in_ties_and_rarely(name):
    theirs, ours = load_both(name)
    assert sum(theirs.encode(text) != ours.encode(text) for text in STRINGS) <= 20
    assert all(theirs.encode(text) == ours.encode(text) for text in SENTENCES)


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_decodes_as_sentencepiece_does(name):
    theirs, ours = load_both(name)
    for text in STRINGS:
        ids = theirs.encode(text)
        # sentencepiece writes ⁇ for unknown text, and removes a ▁ that was in the text.
        if theirs.unk_id() not in ids and not text.lstrip(" ").startswith("▁"):
            assert ours.decode(ids) == theirs.decode(ids), text


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_special_tokens_are_those_of_the_model(name):
    theirs, ours = load_both(name)
    expected = (theirs.bos_id(), theirs.eos_id(), theirs.pad_id(), theirs.unk_id())
    assert (ours.bos_id, ours.eos_id, ours.pad_id, ours.unknown_id) == tuple(
        None if token_id == -1 else token_id for token_id in expected
    )
    assert ours.vocab_size == theirs.vocab_size()
    assert ours.stop_ids == {theirs.eos_id()}
    assert ours.special_ids == {token_id for token_id in expected if token_id != -1}


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_a_saved_tokenizer_loads_with_the_same_ids(name, tmp_path):
    _, ours = load_both(name)
    ours.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert all(again.encode(text) == ours.encode(text) for text in STRINGS)


def test_merges_follow_scores_and_not_the_order_of_pieces():
    model = sentencepiece_model_pb2.ModelProto.FromString(MODEL)
    normal = [piece for piece in model.pieces if piece.type == piece.NORMAL]
    others = [piece for piece in model.pieces if piece.type != piece.NORMAL]
    del model.pieces[:]
    model.pieces.extend(others + normal[::-1])
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
    vocabulary, special = read_sentencepiece_model(model.SerializeToString())
    ours = build_sentencepiece_tokenizer(vocabulary, special, adds_bos=False)
    assert all(ours.encode(text) == theirs.encode(text) for text in STRINGS)


def test_bos_and_eos_follow_the_model_or_its_settings(tmp_path):
    model = tmp_path / "tokenizer.model"
    model.write_bytes(sentencepiece_model(**OPTIONS["bpe as Llama"]))
    plain = load_tokenizer(model).encode("fox", add_special_tokens=False)
    assert load_tokenizer(model).encode("fox") == [1, *plain]
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false, "add_eos_token": true}')
    assert load_tokenizer(tmp_path).encode("fox") == [*plain, 2]

    t5 = tmp_path / "t5" / "spiece.model"
    t5.parent.mkdir()
    t5.write_bytes(sentencepiece_model(**OPTIONS["unigram as T5"]))
    assert load_tokenizer(t5.parent).encode("fox")[-1] == load_tokenizer(t5).eos_id == 1


def test_tokens_added_by_the_settings_follow_those_of_the_model(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model(**OPTIONS["bpe as Llama"]))
    size = load_tokenizer(tmp_path).vocab_size
    added = f'{{"{size}": {{"content": "<|user|>", "special": true}}, "{size + 1}": {{"content": "<think>"}}}}'
    (tmp_path / "tokenizer_config.json").write_text(f'{{"added_tokens_decoder": {added}, "eos_token": "<|user|>"}}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("<|user|><think>", add_special_tokens=False) == [size, size + 1]
    assert tokenizer.decode([size, size + 1]) == "<think>"
    assert tokenizer.eos_id == size
    (tmp_path / "tokenizer_config.json").write_text(
        f'{{"added_tokens_decoder": {added.replace(str(size + 1), "9999")}}}'
    )
    with pytest.raises(ClearheadError, match="'<think>' has the id 9999, which does not follow the vocabulary"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("rule", ["nmt_nfkc", "nfkc_cf"])
def test_character_maps_apply_as_in_sentencepiece(rule):
    model = sentencepiece_model_pb2.ModelProto.FromString(
        sentencepiece_model(model_type="bpe", normalization_rule_name=rule)
    )
    character_map = CharacterMap(model.normalizer_spec.precompiled_charsmap)
    model.normalizer_spec.add_dummy_prefix = False
    model.normalizer_spec.remove_extra_whitespaces = False
    model.normalizer_spec.escape_whitespaces = False
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
    for text in STRINGS:
        assert character_map.apply(text) == theirs.normalize(text)


@given(st.binary(max_size=64), st.text(max_size=10))
def test_a_random_character_map_is_rejected_or_applied(blob, text):
    with suppress(ClearheadError):
        assert isinstance(CharacterMap(blob).apply(text), str)


MODEL = sentencepiece_model(**OPTIONS["bpe as Llama"])


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_damaged_model_is_rejected_or_read(data):
    content = bytearray(MODEL[: data.draw(st.integers(0, len(MODEL)))])
    for index in data.draw(st.lists(st.integers(0, len(MODEL)), max_size=4)):
        if index < len(content):
            content[index] = data.draw(st.integers(0, 255))
    with suppress(ClearheadError):
        vocabulary, special = read_sentencepiece_model(bytes(content))
        assert build_sentencepiece_tokenizer(vocabulary, special, adds_bos=False).encode("The fox")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": 3}, "of type word or char"),
        ({"treat_whitespace_as_suffix": True}, "does not write the space before a word as ▁"),
        ({"twice": True}, "occurs 2 times"),
        ({"empty": True}, "is empty"),
        ({"long": True}, "has 600 characters"),
    ],
)
def test_unsupported_models_are_rejected(change, message):
    model = sentencepiece_model_pb2.ModelProto.FromString(MODEL)
    if "model_type" in change:
        model.trainer_spec.model_type = change["model_type"]
    model.trainer_spec.treat_whitespace_as_suffix = change.get("treat_whitespace_as_suffix", False)
    replaced = {"twice": model.pieces[5].piece, "empty": "", "long": "x" * 600}
    for key in change.keys() & replaced.keys():
        model.pieces[300].piece = replaced[key]
    with pytest.raises(ClearheadError, match=message):
        read_sentencepiece_model(model.SerializeToString())
