"""Hostile tokenizer files are rejected at once and in little memory; measured in a process of their own."""

import base64
import json
import struct

import pytest

from clearhead.errors import ClearheadError
from clearhead.tokenization.byte_level import merges_by_rank
from clearhead.tokenization.character_map import CharacterMap
from clearhead.tokenization.load import load_tokenizer
from clearhead.tokenization.tokenizer_limits import check_vocabulary, parse_tokenizer_json
from tests.tokenization.measured_forks import measured_forks
from tests.tokenization.samples import LIBRARY_TOKENIZERS

MAX_SECONDS = 2.0  # for reading the file, encoding a text and decoding it
MAX_BYTES = 300 << 20

VOCABULARY = {token: index for index, token in enumerate("abhelo ")}


def tokenizer(**parts):
    """Return the contents of a tokenizer.json of seven letters, with other parts."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {"type": "BPE", "vocab": VOCABULARY, "merges": []},
        **parts,
    }


def replace(pattern, content, kind="String"):
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def normalizers(*steps):
    return tokenizer(normalizer={"type": "Sequence", "normalizers": [*steps]})


def decoders(*steps):
    return tokenizer(decoder={"type": "Sequence", "decoders": [*steps]})


def pre_tokenizers(*steps):
    return tokenizer(pre_tokenizer={"type": "Sequence", "pretokenizers": [*steps]})


def nested(depth):
    step = replace("a", "aa")
    for _ in range(depth):
        step = {"type": "Sequence", "decoders": [step]}
    return tokenizer(decoder=step)


def template(pieces, num_ids=1):
    special = {"x": {"id": "x", "ids": [0] * num_ids, "tokens": ["a"] * num_ids}}
    pair = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    return {"type": "TemplateProcessing", "single": pieces, "pair": pair, "special_tokens": special}


def added(count, text, **options):
    base = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    return [{"id": 7 + index, "content": text + str(index), **base, **options} for index in range(count)]


def unigram(*tokens):
    return tokenizer(model={"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], *([t, -1.0] for t in tokens)]})


def bpe(vocabulary, merges, prefix):
    return tokenizer(model={"type": "BPE", "vocab": vocabulary, "merges": merges, "continuing_subword_prefix": prefix})


def character_map(trie=b"\0" * 4, replacement=b"x", count=1):
    return struct.pack("<I", len(trie)) + trie + (replacement + b"\0") * count


def precompiled(blob):
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(blob).decode()}


TEXT = {"Sequence": {"id": "A", "type_id": 0}}
TOKEN = {"SpecialToken": {"id": "x", "type_id": 0}}
REJECTED = {
    "doubling decoders": (decoders(*[replace("a", "aa")] * 28), "times as long"),
    "doubling normalizers": (normalizers(*[replace("a", "aa")] * 28), "times as long"),
    "doubling without a type": (normalizers(*[{"pattern": {"String": "a"}, "content": "aa"}] * 28), "times as long"),
    "empty patterns": (decoders(*[replace("", "xx", "Regex")] * 28), "times as long"),
    "empty texts": (normalizers(*[replace("", "xx")] * 28), "times as long"),
    "optional patterns": (decoders(*[replace("a?", "xx", "Regex")] * 10), "times as long"),
    "long contents": (normalizers(replace("a", "a" * 100_000)), "content has 100000 characters"),
    "long content": (decoders(replace("a", "a" * 1000)), "1000 times as long"),
    "long prefixes": (normalizers(*[{"type": "Prepend", "prepend": "x" * 10**6}] * 20), "prepend has 1000000"),
    "many steps": (normalizers(*[{"type": "NFKD"}] * 10_000), "10001 steps"),
    "many splits": (pre_tokenizers(*[split("a")] * 10_000), "10001 steps"),
    "nested sequences": (nested(60), "nested more than 8 deep"),
    "nested sequences of sequences": (
        tokenizer(decoder={"type": "Sequence", "decoders": [{"type": "Sequence", "decoders": [{}] * 99}] * 99}),
        "steps",
    ),
    "long patterns": (pre_tokenizers(split("(?i)" + "[a-zß-ž]" * 100_000)), "patterns have 800004 characters"),
    "many long patterns": (pre_tokenizers(*[split("[^a]" * 1000)] * 60), "patterns have 240000 characters"),
    "pieces of length 0": (tokenizer(pre_tokenizer={"type": "FixedLength", "length": 0}), "length 0"),
    "huge numbers": (tokenizer(decoder={"type": "Strip", "content": "a", "start": 2**62, "stop": 0}), "start is"),
    "a text many times": (tokenizer(post_processor=template([TEXT] * 1000)), "post-processor"),
    "a text twice, again and again": (
        tokenizer(post_processor={"type": "Sequence", "processors": [template([TEXT] * 2)] * 30}),
        "post-processor",
    ),
    "many special tokens": (tokenizer(post_processor=template([TEXT, *[TOKEN] * 10_000])), "post-processor"),
    "special tokens of many ids": (tokenizer(post_processor=template([TEXT, TOKEN], 10**6)), "post-processor"),
    "a long added token": (tokenizer(added_tokens=added(1, "a" * 4_000_000)), "has 4000001 characters"),
    "many added tokens": (tokenizer(added_tokens=added(10_000, "a" * 1000)), "added tokens have"),
    "added tokens that are normalized": (
        {**normalizers(*[replace("a", "aa")] * 8), "added_tokens": added(99, "a" * 1000, normalized=True)},
        "added tokens have",
    ),
    "a long Unigram token": (unigram("a" * 4_000_000), "has 4000000 characters"),
    "many long Unigram tokens": (unigram(*[f"{i}" + "a" * 1000 for i in range(9999)]), "the vocabulary has"),
    "a long token": (tokenizer(model={"type": "BPE", "vocab": {"a" * 10**6: 0}, "merges": []}), "1000000 characters"),
    "a long suffix of words": (
        tokenizer(model={"type": "BPE", "vocab": VOCABULARY, "merges": [], "end_of_word_suffix": "y" * 10**6}),
        "end_of_word_suffix has 1000000",
    ),
    "a prefix that cuts a character": (bpe({"a": 0, "é": 1}, [["a", "é"]], "#"), "does not begin with '#'"),
    "a prefix that is longer than a token": (bpe({"a": 0, "b": 1}, ["a b"], "###"), "does not begin with '###'"),
    "a prefix that cuts a later character": (
        bpe({"a": 0, "##b": 1, "ab": 2, "#é": 3}, ["a ##b", "a #é"], "##"),
        "the merge 'a #é' does not begin with '##'",
    ),
    "long words": (
        tokenizer(model={"type": "WordPiece", "vocab": VOCABULARY, "max_input_chars_per_word": 10**18}),
        "max_input_chars_per_word is",
    ),
    "a large character map": (normalizers(precompiled(character_map(count=3_000_000))), "character map has"),
    "a character map with a long text": (
        normalizers(precompiled(character_map(replacement=b"x" * 10**6))),
        "a character by 1000000 bytes",
    ),
    "several character maps": (
        normalizers(*[precompiled(character_map(replacement=b"x" * 60))] * 5),
        "times as long",
    ),
    "many lists": ("[" + "[]," * 3_000_000 + "[]]", "more than 4194304 values or 2097152 lists"),
    "many numbers": ("[" + "0," * 5_000_000 + "0]", "more than 4194304 values"),
    "deep lists": ("[" * 1_000_000, "not valid JSON"),
    "the same key twice": (
        json.dumps(decoders(*[replace("a", "aa")] * 28))[:-1] + ', "decoder": null}',
        "the same key twice",
    ),
}
LOAD = """
from clearhead.errors import ClearheadError
from clearhead.tokenization.load import load_tokenizer

def run(path):
    try:
        tokenizer = load_tokenizer(path)
        return repr(tokenizer.decode(tokenizer.encode("hello " * 100))[:50])
    except ClearheadError as error:
        return str(error)
"""


@pytest.fixture(scope="module")
def forks():
    with measured_forks(LOAD) as measure:
        yield measure


@pytest.fixture
def measure(forks, tmp_path):
    """Return a function from the contents of a tokenizer.json to the seconds, peak memory and message of loading it."""

    def load(content):
        path = tmp_path / "tokenizer.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return forks(str(path))

    return load


@pytest.mark.parametrize("name", REJECTED)
def test_hostile_files_are_rejected(name, measure):
    content, message = REJECTED[name]
    seconds, peak_bytes, outcome = measure(content)
    assert message in outcome
    assert len(outcome) < 1000
    assert seconds < MAX_SECONDS
    assert peak_bytes < MAX_BYTES


AT_THE_LIMITS = {
    "growth": decoders(*[replace("a", "aa")] * 8),
    "growth of a text": normalizers(*[replace("l", "ll")] * 8),
    "steps": normalizers(*[{"type": "NFKD"}] * 63),
    "pattern": pre_tokenizers(split("(?i:[^\\p{L}ß])" * 9000)),
    "nested quantifiers": pre_tokenizers(split("(l+l?)+$")),
    "wide strip": tokenizer(decoder={"type": "Strip", "content": "h", "start": 9, "stop": 9}),
    "added tokens": tokenizer(added_tokens=added(4000, "a" * 1000)),
    "Unigram": unigram(*[f"{i}" + "a" * 1000 for i in range(100)]),
}


@pytest.mark.parametrize("name", AT_THE_LIMITS)
def test_files_at_the_limits_are_read_or_fail_with_one_message(name, measure):
    seconds, peak_bytes, _ = measure(AT_THE_LIMITS[name])
    assert seconds < 2 * MAX_SECONDS
    assert peak_bytes < 2 * MAX_BYTES


@pytest.mark.parametrize("kind", sorted(LIBRARY_TOKENIZERS))
def test_usual_files_are_within_the_limits(kind):
    parsed = parse_tokenizer_json(LIBRARY_TOKENIZERS[kind]().to_str().encode())
    assert parsed == json.loads(LIBRARY_TOKENIZERS[kind]().to_str())


def test_a_token_that_occurs_twice_in_a_vocabulary_is_accepted():
    assert parse_tokenizer_json(b'{"model": {"vocab": {"a": 0, "a": 1}}}') == {"model": {"vocab": {"a": 1}}}


@pytest.mark.parametrize("merge", ["a ##b", ["a", "##b"]])
def test_a_prefix_that_the_merges_have_is_accepted(merge, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(bpe({"a": 0, "##b": 1, "ab": 2}, [merge], "##")))
    assert load_tokenizer(tmp_path).encode("ab") == [2]


def test_loading_decodes_nothing(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(decoders(replace("a", "b"))))
    loaded = load_tokenizer(path)
    assert not {"_is_byte_level", "_has_byte_tokens"} & {*vars(loaded)}
    assert loaded.decode(loaded.encode("hello a")) == "hello b"


def test_other_vocabularies_have_the_same_limits():
    with pytest.raises(ClearheadError, match="has 1025 characters"):
        merges_by_rank(["a" * 1025])
    with pytest.raises(ClearheadError, match="at most 4194304 are allowed"):
        check_vocabulary(("世" * 1000 for _ in range(2000)), is_unigram=True)
    with pytest.raises(ClearheadError, match="by 65 bytes"):
        CharacterMap(character_map(replacement=b"x" * 65))
