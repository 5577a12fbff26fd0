"""Token shards: what is written comes back, and what is broken is found at the door."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.data.shards import open_shards, verify_shards, write_shards
from clearhead.data.tokens import Tokens
from clearhead.errors import ClearheadError
from clearhead.tokenization.characters import byte_tokenizer, character_tokenizer
from clearhead.tokenization.fast import SpecialTokens

BYTES = byte_tokenizer()
DOCUMENTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [10, 11]]


class Wide:
    """A vocabulary beyond two bytes."""

    vocab_size = 70_000

    def token_text(self, token_id):
        return str(token_id)


@pytest.fixture
def folder(tmp_path):
    write_shards(tmp_path / "corpus", DOCUMENTS, BYTES, max_shard_tokens=5)
    return tmp_path / "corpus"


def everything(tokens):
    return tokens.read(0, len(tokens)).tolist()


def test_documents_come_back_from_several_shards(folder):
    assert [shard.num_tokens for shard in verify_shards(folder).shards] == [4, 5, 2]
    tokens = open_shards(folder, BYTES)
    assert everything(tokens) == [token for document in DOCUMENTS for token in document]
    assert tokens.read(2, 8).tolist() == [3, 4, 5, 6, 7, 8, 9, 10]  # across two borders
    starts, lengths = tokens.documents()
    assert lengths.tolist() == [3, 1, 5, 2]
    assert starts.tolist() == [0, 3, 4, 9]


def test_the_files_are_what_the_docstring_says(folder):
    assert np.fromfile(folder / "00001.tokens", "<u2").tolist() == [5, 6, 7, 8, 9]
    assert np.fromfile(folder / "00000.lengths", "<u4").tolist() == [3, 1]


def test_wide_vocabularies_take_four_bytes(tmp_path):
    write_shards(tmp_path, [[69_999, 1]], Wide())
    assert np.fromfile(tmp_path / "00000.tokens", "<u4").tolist() == [69_999, 1]
    assert everything(open_shards(tmp_path, Wide())) == [69_999, 1]


def test_a_corpus_stays_on_disk_and_goes_to_workers_by_name(folder):
    tokens = open_shards(folder)
    assert all(isinstance(part, np.memmap) for part in tokens._parts)
    sent = pickle.dumps(tokens.split(0.5)[1])
    assert b"00001.tokens" in sent
    assert everything(pickle.loads(sent)) == [6, 7, 8, 9, 10, 11]


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=9), min_size=1, max_size=9),
    st.floats(0.01, 0.99),
)
def test_split_loses_nothing(documents, share):
    tokens = Tokens.of(documents)
    first, second = tokens.split(share)
    assert everything(first) + everything(second) == everything(tokens)
    border = len(everything(first))
    ends = [end for end in np.cumsum([len(document) for document in documents]).tolist() if end > border]
    starts, lengths = second.documents()
    assert (starts + lengths + border).tolist() == ends
    assert lengths.sum() == len(second)


def test_a_cut_shard_is_found_at_open(folder):
    path = folder / "00001.tokens"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ClearheadError, match=r"00001.tokens has 9 bytes, index.json says 10"):
        open_shards(folder)


@pytest.mark.parametrize("name", ["00000.tokens", "00002.lengths"])
def test_a_missing_file_is_found_at_open(folder, name):
    (folder / name).unlink()
    with pytest.raises(ClearheadError, match=f"{name} has 0 bytes"):
        open_shards(folder)


def test_a_changed_byte_is_found_by_verify(folder):
    path = folder / "00000.tokens"
    path.write_bytes(b"\x07" + path.read_bytes()[1:])
    open_shards(folder)
    with pytest.raises(ClearheadError, match=r"00000.tokens is not what was written"):
        verify_shards(folder)


def test_lengths_that_do_not_add_up(folder):
    np.array([9, 9], "<u4").tofile(folder / "00000.lengths")
    with pytest.raises(ClearheadError, match="does not add up to the 4 tokens"):
        open_shards(folder)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("clearhead-tokens-1", "clearhead-tokens-2", "is not of the format clearhead-tokens-1"),
        ('"00000"', '"../secret"', "is not of the format"),
        ('"num_tokens": 4', '"num_tokens": 0', "is not of the format"),
        ("num_tokens", "tokens_num", "cannot be read: unknown key"),
        ("{", "", "cannot be read: not valid JSON"),
    ],
)
def test_an_index_that_cannot_be_trusted(folder, old, new, message):
    path = folder / "index.json"
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ClearheadError, match=message):
        open_shards(folder)


def test_writing_that_was_cut_short_leaves_no_index(tmp_path):
    def documents():
        yield [1, 2]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_shards(tmp_path, documents(), BYTES)
    with pytest.raises(ClearheadError, match="writing them was cut short"):
        open_shards(tmp_path)


def test_no_documents_and_a_folder_in_use(folder, tmp_path):
    with pytest.raises(ClearheadError, match="the corpus is empty"):
        write_shards(tmp_path / "other", [[], []], BYTES)
    with pytest.raises(ClearheadError, match="holds token shards already"):
        write_shards(folder, DOCUMENTS, BYTES)


def test_written_over_none_of_the_old_is_left(folder):
    (folder / "notes.txt").write_text("of another hand")
    write_shards(folder, [[1, 2, 3]], BYTES, overwrite=True)
    assert {path.name for path in folder.iterdir()} == {"00000.tokens", "00000.lengths", "index.json", "notes.txt"}
    assert verify_shards(folder).shards[0].num_tokens == 3


def test_what_was_there_stays_until_the_new_shards_are_whole(tmp_path):
    def broken():
        yield [4, 5]
        raise OSError("the disk went away")

    write_shards(tmp_path, [[1, 2, 3]], BYTES)
    with pytest.raises(OSError, match="went away"):
        write_shards(tmp_path, broken(), BYTES, max_shard_tokens=1, overwrite=True)
    assert verify_shards(tmp_path).shards[0].num_tokens == 3
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".tokens", ".lengths"}


def test_another_vocabulary(tmp_path):
    special = SpecialTokens(unknown="?")
    write_shards(tmp_path, DOCUMENTS, character_tokenizer("abc", special))
    with pytest.raises(ClearheadError, match="a vocabulary of 4 tokens, the tokenizer has 5"):
        open_shards(tmp_path, character_tokenizer("abcd", special))
    with pytest.raises(ClearheadError, match="another vocabulary of the same size"):
        open_shards(tmp_path, character_tokenizer("abd", special))
