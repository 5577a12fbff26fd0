"""`clearhead tokenizer train` and `clearhead shards`, as a user meets them."""

import json
import subprocess
import sys

import pytest

from clearhead.tokenization.load import load_tokenizer


def clearhead(*arguments):
    command = [sys.executable, "-m", "clearhead", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text("the cat sat on the mat\n" * 50)
    return path


def test_train_a_tokenizer_then_write_and_verify_shards(corpus, tmp_path):
    done = clearhead("tokenizer", "train", corpus, "--vocab-size", 265, "--out", tmp_path / "tokenizer", "--json")
    assert json.loads(done.stdout) == {"folder": str(tmp_path / "tokenizer"), "kind": "bpe", "vocab_size": 265}
    assert load_tokenizer(tmp_path / "tokenizer").vocab_size == 265
    again = ("tokenizer", "train", corpus, "--vocab-size", 264, "--out", tmp_path / "tokenizer")
    refused = clearhead(*again)
    assert refused.returncode == 1
    assert "tokenizer.json exists already; give another folder, or --overwrite" in refused.stderr
    assert load_tokenizer(tmp_path / "tokenizer").vocab_size == 265
    assert clearhead(*again, "--overwrite").returncode == 0
    assert load_tokenizer(tmp_path / "tokenizer").vocab_size == 264
    arguments = ["--unit", "line", "--tokenizer", tmp_path / "tokenizer", "--out", tmp_path / "shards", "--json"]
    written = json.loads(clearhead("shards", "write", corpus, *arguments).stdout)
    assert written["documents"] == 50
    assert json.loads(clearhead("shards", "verify", tmp_path / "shards", "--json").stdout) == written
    refused = clearhead("shards", "write", corpus, *arguments)
    assert refused.returncode == 1
    assert "index.json exists already; give another folder, or --overwrite" in refused.stderr
    assert json.loads(clearhead("shards", "write", corpus, *arguments, "--overwrite").stdout) == written
    (tmp_path / "shards" / "00000.tokens").write_bytes(b"")
    done = clearhead("shards", "verify", tmp_path / "shards")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "00000.tokens has 0 bytes" in done.stderr


def test_a_corpus_that_is_not_text_is_one_sentence(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abc\xff")
    done = clearhead("tokenizer", "train", tmp_path / "a.txt", "--vocab-size", 300, "--out", tmp_path / "out")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "byte 0xff at offset 3" in done.stderr
    assert not (tmp_path / "out").exists()
