"""Tokenizers from vocab.json and merges.txt compared with those that transformers builds from the same files."""

import json
import random

import pytest
import tokenizers
import transformers

from clearhead.checkpoint.folder_tokenizer import has_tokenizer, load_folder_tokenizer
from clearhead.errors import ClearheadError
from clearhead.tokenization import load_tokenizer

TEXT = "Zürich liegt am See. The cat's mat isn't 1,024 km away; it costs 5 €!  Two  spaces\n\n\ttab, naïve café 日本 😀"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Train a byte-level BPE and return its vocabulary and merges."""
    library = tokenizers.ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>"]
    library.train_from_iterator([TEXT] * 5, vocab_size=340, min_frequency=1, special_tokens=special)
    folder = tmp_path_factory.mktemp("trained")
    library.save_model(str(folder))
    return (folder / "vocab.json").read_text(), (folder / "merges.txt").read_text()


def write(folder, files, **config):
    (folder / "vocab.json").write_text(files[0])
    (folder / "merges.txt").write_text(files[1])
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))


def texts():
    generator = random.Random(0)
    characters = list(dict.fromkeys(TEXT + "abcxyz ÄÖ-_<>|"))
    return [TEXT, "", " a", "x<|endoftext|>y", "a <mask> b"] + [
        "".join(generator.choices(characters, k=generator.randrange(1, 30))) for _ in range(200)
    ]


@pytest.mark.parametrize(
    ("class_name", "config"),
    [
        ("GPT2Tokenizer", {"tokenizer_class": "GPT2Tokenizer"}),
        ("GPT2Tokenizer", {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}),
        ("RobertaTokenizer", {"tokenizer_class": "RobertaTokenizer"}),
    ],
)
def test_ids_equal_those_of_transformers(tmp_path, files, class_name, config):
    write(tmp_path, files, **config)
    theirs = getattr(transformers, class_name).from_pretrained(tmp_path)
    ours = load_folder_tokenizer(tmp_path)
    for text in texts():
        assert ours.encode(text) == theirs.encode(text), text
        ids = ours.encode(text, add_special_tokens=False)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, clean_up_tokenization_spaces=False)
    ours.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert [again.encode(text) for text in texts()] == [ours.encode(text) for text in texts()]


def test_special_tokens_without_a_config(tmp_path, files):
    write(tmp_path, files)
    tokenizer = load_folder_tokenizer(tmp_path)
    assert tokenizer.eos_id == tokenizer.bos_id == json.loads(files[0])["<|endoftext|>"]
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


@pytest.mark.parametrize(
    ("merges", "message"),
    [
        ("#version: 0.2\na b c\n", "a line must have two tokens"),
        ("a b</w>\n", "not bytes; save the tokenizer as tokenizer.json first"),
        ("qqq zzz\n", "cannot be loaded"),
    ],
)
def test_damaged_files(tmp_path, files, merges, message):
    write(tmp_path, (files[0], merges))
    with pytest.raises(ClearheadError, match=message):
        load_folder_tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text('["a"]')
    with pytest.raises(ClearheadError, match="must hold an object from tokens to ids"):
        load_folder_tokenizer(tmp_path)
    (tmp_path / "merges.txt").unlink()
    assert not has_tokenizer(tmp_path)
