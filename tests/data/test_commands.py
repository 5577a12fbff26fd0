"""Test the commands `clearhead tokenizer train` and `clearhead shards`."""

import json

import pytest

from clearhead.tokenization.load import load_tokenizer
from tests.forked_command import run_forked as run_clearhead


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text("the cat sat on the mat\n" * 50)
    return path


def test_train_a_tokenizer_then_write_and_verify_shards(corpus, tmp_path):
    done = run_clearhead("tokenizer", "train", corpus, "--vocab-size", 265, "--out", tmp_path / "tokenizer", "--json")
    assert json.loads(done.stdout) == {"folder": str(tmp_path / "tokenizer"), "kind": "bpe", "vocab_size": 265}
    assert load_tokenizer(tmp_path / "tokenizer").vocab_size == 265
    train_again = ("tokenizer", "train", corpus, "--vocab-size", 264, "--out", tmp_path / "tokenizer")
    rejected = run_clearhead(*train_again)
    assert rejected.returncode == 1
    assert "tokenizer.json already exists; choose another folder or add --overwrite" in rejected.stderr
    assert load_tokenizer(tmp_path / "tokenizer").vocab_size == 265
    assert run_clearhead(*train_again, "--overwrite").returncode == 0
    assert load_tokenizer(tmp_path / "tokenizer").vocab_size == 264
    arguments = ["--unit", "line", "--tokenizer", tmp_path / "tokenizer", "--out", tmp_path / "shards", "--json"]
    written = json.loads(run_clearhead("shards", "write", corpus, *arguments).stdout)
    assert written["documents"] == 50
    assert json.loads(run_clearhead("shards", "verify", tmp_path / "shards", "--json").stdout) == written
    rejected = run_clearhead("shards", "write", corpus, *arguments)
    assert rejected.returncode == 1
    assert "index.json already exists; choose another folder or add --overwrite" in rejected.stderr
    assert json.loads(run_clearhead("shards", "write", corpus, *arguments, "--overwrite").stdout) == written
    (tmp_path / "shards" / "00000.tokens").write_bytes(b"")
    done = run_clearhead("shards", "verify", tmp_path / "shards")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "00000.tokens has 0 bytes" in done.stderr


def test_a_corpus_that_is_not_utf8_gives_a_one_line_error(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abc\xff")
    done = run_clearhead("tokenizer", "train", tmp_path / "a.txt", "--vocab-size", 300, "--out", tmp_path / "out")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "byte 0xff at offset 3" in done.stderr
    assert not (tmp_path / "out").exists()
