"""Test token shards: documents are read back unchanged, and damaged files are detected when they are opened."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.data.shards import open_shards, verify_shards, write_shards
from clearhead.data.tokens import Tokens
from clearhead.errors import ClearheadError
from clearhead.tokenization.characters import byte_tokenizer, character_tokenizer
from clearhead.tokenization.library_tokenizer import SpecialTokens

BYTES = byte_tokenizer()
DOCUMENTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [10, 11]]


class LargeVocabulary:
    """A tokenizer whose ids need more than two bytes."""

    vocab_size = 70_000

    def token_text(self, token_id):
        return str(token_id)


@pytest.fixture
def folder(tmp_path):
    write_shards(tmp_path / "corpus", DOCUMENTS, BYTES, max_shard_tokens=5)
    return tmp_path / "corpus"


def all_ids(tokens):
    return tokens.read(0, len(tokens)).tolist()


def test_documents_are_read_back_from_several_shards(folder):
    assert [shard.num_tokens for shard in verify_shards(folder).shards] == [4, 5, 2]
    tokens = open_shards(folder, BYTES)
    assert all_ids(tokens) == [token for document in DOCUMENTS for token in document]
    assert tokens.read(2, 8).tolist() == [3, 4, 5, 6, 7, 8, 9, 10]  # across two shard borders
    starts, lengths = tokens.documents()
    assert lengths.tolist() == [3, 1, 5, 2]
    assert starts.tolist() == [0, 3, 4, 9]


def test_the_files_have_the_documented_format(folder):
    assert np.fromfile(folder / "00001.tokens", "<u2").tolist() == [5, 6, 7, 8, 9]
    assert np.fromfile(folder / "00000.lengths", "<u4").tolist() == [3, 1]


def test_large_vocabularies_are_stored_in_four_bytes(tmp_path):
    write_shards(tmp_path, [[69_999, 1]], LargeVocabulary())
    assert np.fromfile(tmp_path / "00000.tokens", "<u4").tolist() == [69_999, 1]
    assert all_ids(open_shards(tmp_path, LargeVocabulary())) == [69_999, 1]


def test_shards_are_memory_mapped_and_pickled_by_file_name(folder):
    tokens = open_shards(folder)
    assert all(isinstance(part, np.memmap) for part in tokens._parts)
    pickled = pickle.dumps(tokens.split(0.5)[1])
    assert b"00001.tokens" in pickled
    assert all_ids(pickle.loads(pickled)) == [6, 7, 8, 9, 10, 11]


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=9), min_size=1, max_size=9),
    st.floats(0.01, 0.99),
)
def test_split_keeps_all_tokens_and_document_ends(documents, share):
    tokens = Tokens.from_documents(documents)
    first, second = tokens.split(share)
    assert all_ids(first) + all_ids(second) == all_ids(tokens)
    border = len(all_ids(first))
    ends = [end for end in np.cumsum([len(document) for document in documents]).tolist() if end > border]
    starts, lengths = second.documents()
    assert (starts + lengths + border).tolist() == ends
    assert lengths.sum() == len(second)


def test_open_detects_a_truncated_shard(folder):
    path = folder / "00001.tokens"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ClearheadError, match=r"00001.tokens has 9 bytes, but index.json lists 10"):
        open_shards(folder)


@pytest.mark.parametrize("name", ["00000.tokens", "00002.lengths"])
def test_open_detects_a_missing_file(folder, name):
    (folder / name).unlink()
    with pytest.raises(ClearheadError, match=f"{name} has 0 bytes"):
        open_shards(folder)


def test_verify_detects_a_changed_byte(folder):
    path = folder / "00000.tokens"
    path.write_bytes(b"\x07" + path.read_bytes()[1:])
    open_shards(folder)
    with pytest.raises(ClearheadError, match=r"00000.tokens is damaged"):
        verify_shards(folder)


def test_open_detects_lengths_that_do_not_add_up(folder):
    np.array([9, 9], "<u4").tofile(folder / "00000.lengths")
    with pytest.raises(ClearheadError, match="do not add up to the 4 tokens"):
        open_shards(folder)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("clearhead-tokens-1", "clearhead-tokens-2", "does not have the format clearhead-tokens-1"),
        ('"00000"', '"../secret"', "does not have the format"),
        ('"num_tokens": 4', '"num_tokens": 0', "does not have the format"),
        ("num_tokens", "tokens_num", "cannot be read: unknown key"),
        ("{", "", "cannot be read: .*not valid JSON"),
    ],
)
def test_open_rejects_an_invalid_index(folder, old, new, message):
    path = folder / "index.json"
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ClearheadError, match=message):
        open_shards(folder)


def test_interrupted_writing_leaves_no_index(tmp_path):
    def documents():
        yield [1, 2]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_shards(tmp_path, documents(), BYTES)
    with pytest.raises(ClearheadError, match="writing them was interrupted"):
        open_shards(tmp_path)


def test_write_rejects_an_empty_corpus_and_existing_shards(folder, tmp_path):
    with pytest.raises(ClearheadError, match="the corpus is empty"):
        write_shards(tmp_path / "other", [[], []], BYTES)
    with pytest.raises(ClearheadError, match="already contains token shards"):
        write_shards(folder, DOCUMENTS, BYTES)


def test_overwrite_removes_all_old_shards_and_no_other_file(folder):
    (folder / "notes.txt").write_text("not a shard")
    write_shards(folder, [[1, 2, 3]], BYTES, overwrite=True)
    assert {path.name for path in folder.iterdir()} == {"00000.tokens", "00000.lengths", "index.json", "notes.txt"}
    assert verify_shards(folder).shards[0].num_tokens == 3


def test_a_failed_overwrite_keeps_the_old_shards(tmp_path):
    def failing_documents():
        yield [4, 5]
        raise OSError("the disk failed")

    write_shards(tmp_path, [[1, 2, 3]], BYTES)
    with pytest.raises(OSError, match="the disk failed"):
        write_shards(tmp_path, failing_documents(), BYTES, max_shard_tokens=1, overwrite=True)
    assert verify_shards(tmp_path).shards[0].num_tokens == 3
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".tokens", ".lengths"}


def test_open_rejects_a_tokenizer_with_another_vocabulary(tmp_path):
    special = SpecialTokens(unknown="?")
    write_shards(tmp_path, DOCUMENTS, character_tokenizer("abc", special))
    with pytest.raises(ClearheadError, match="a vocabulary of 4 tokens, but the tokenizer has 5"):
        open_shards(tmp_path, character_tokenizer("abcd", special))
    with pytest.raises(ClearheadError, match="another vocabulary of the same size"):
        open_shards(tmp_path, character_tokenizer("abd", special))


def test_an_id_outside_the_vocabulary_is_rejected_when_it_is_read(tmp_path):
    write_shards(tmp_path, [[1, 2, 3], [4, 5]], BYTES)
    path = tmp_path / "00000.tokens"
    path.write_bytes(path.read_bytes()[:-2] + b"\xff\xff")
    tokens = open_shards(tmp_path, BYTES)
    assert tokens.read(0, 4).tolist() == [1, 2, 3, 4]
    with pytest.raises(ClearheadError, match=r"contain the id 65535, but their vocabulary has \d+ tokens"):
        tokens.split(0.5)[1].read(0, 3)
