"""Test building datasets from [data] tables, with real and small files, and the errors for unusable data."""

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from transformers import MarianTokenizer
from transformers.models.bart.modeling_bart import shift_tokens_right

from clearhead.config import from_dict, from_toml, to_dict
from clearhead.data import config as tables
from clearhead.data.batch import IGNORED
from clearhead.data.config import (
    ChatData,
    Masked,
    PairData,
    PairTable,
    ParallelFiles,
    ShardData,
    SpanCorruption,
    SyntheticData,
    TextData,
)
from clearhead.data.counter_random import row_keys
from clearhead.data.loader import Loader, evaluation_batches
from clearhead.data.open import open_data, open_pairs, tokenizer_texts
from clearhead.data.shards import write_shards
from clearhead.errors import ClearheadError
from clearhead.tokenization.characters import byte_tokenizer
from clearhead.tokenization.library_tokenizer import LibraryTokenizer, SpecialTokens
from clearhead.tokenization.marian import load_marian_tokenizer
from clearhead.tokenization.train import train_tokenizer
from tests.tokenization.samples import SENTENCES
from tests.tokenization.test_marian import write_folder

DATA = Path(__file__).parents[3] / "shared" / "data"
BYTES = byte_tokenizer(SpecialTokens(bos="<s>", eos="</s>"))


@pytest.fixture(scope="module")
def shakespeare():
    path = DATA / "tinyshakespeare.txt"
    if not path.is_file():
        pytest.skip("tinyshakespeare.txt is not beside this checkout")
    return path


@pytest.fixture(scope="module")
def multi30k():
    folder = DATA / "multi30k"
    if not folder.is_dir():
        pytest.skip("multi30k is not beside this checkout")
    return folder


def first_rows(dataset, count=2):
    rows = np.arange(count)
    return dataset.batch(rows, row_keys(0, 0, rows))


def decode(ids):
    return BYTES.decode([token for token in ids.tolist() if token != IGNORED], skip_special_tokens=False)


def template_tokenizer(template):
    """Return a word tokenizer that adds the special tokens of a template, such as `<s> $A </s>`."""
    words = ["<s>", "</s>", "<pad>", "<unk>", "one", "two", "eins", "zwei", "drei"]
    vocabulary = {word: number for number, word in enumerate(words)}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = [("<s>", 0), ("</s>", 1)]
    library.post_processor = tokenizers.processors.TemplateProcessing(single=template, special_tokens=special)
    return LibraryTokenizer(library, SpecialTokens(bos="<s>", eos="</s>", pad="<pad>", unknown="<unk>"))


# --- long texts


def test_shakespeare_is_split_as_in_nanogpt(shakespeare):
    """nanoGPT, data/shakespeare_char: 65 characters, 1,003,854 for training and 111,540 for validation."""
    data = TextData(path=str(shakespeare), context=64)
    tokenizer = train_tokenizer(tokenizer_texts(data), "character")
    assert tokenizer.vocab_size == 65 + 1  # the unknown token is extra
    train, validation = open_data(data, tokenizer)
    assert (len(train), len(validation)) == (1_003_853 // 64, 111_539 // 64)
    text = shakespeare.read_text(encoding="utf-8")
    batch = first_rows(validation)
    assert tokenizer.decode(batch.tokens[0].tolist()) == text[1_003_854:][:64]
    assert tokenizer.decode(batch.targets[1].tolist()) == text[1_003_854:][65:129]
    for window in first_rows(train, 8).tokens.tolist():
        assert tokenizer.decode(window) in text[:1_003_854]


def test_packed_lines_end_with_the_end_of_text_token(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo two\nthree\nfour\n")
    data = TextData(path=str(path), context=9, unit="line", rows="packed", validation_path=str(path))
    batch = first_rows(open_data(data, BYTES)[0], 3)
    documents = [
        [decode(row[numbers == number]) for number in numbers.unique()]
        for row, numbers in zip(batch.targets, batch.documents, strict=True)
    ]
    assert documents == [["wo two</s>", ""], ["hree</s>", "our</s>"], ["ne</s>", ""]]


def test_shards_give_the_same_batches_as_the_text(tmp_path):
    text = "some words to learn from, " * 20
    (tmp_path / "a.txt").write_text(text)
    write_shards(tmp_path / "shards", [[*BYTES.encode(text), BYTES.eos_id]], BYTES)
    from_text, from_shards = (
        open_data(kind(path=str(tmp_path / name), context=16), BYTES)
        for kind, name in ((TextData, "a.txt"), (ShardData, "shards"))
    )
    for ours, theirs in zip(from_text, from_shards, strict=True):
        assert torch.equal(first_rows(ours).tokens, first_rows(theirs).tokens)
    in_process, by_workers = (
        [batch.tokens.tolist() for batch, _ in islice(Loader(from_shards[0], 4, num_workers=number), 10)]
        for number in (0, 2)
    )
    assert in_process == by_workers


def test_masked_and_span_corruption_use_the_special_tokens_of_the_tokenizer(tmp_path):
    (tmp_path / "a.txt").write_text("a few words to hide and to find again " * 100)
    sentinels = [f"<extra_id_{number}>" for number in range(4)]
    tokenizer = train_tokenizer(
        ["a few words to hide and to find again"],
        "bpe",
        300,
        SpecialTokens(bos="<s>", eos="</s>"),
        ["[MASK]", *sentinels],
    )
    path = str(tmp_path / "a.txt")
    batch = first_rows(open_data(TextData(path=path, context=40, objective=Masked()), tokenizer)[0], 8)
    (mask_id,) = tokenizer.encode("[MASK]")
    assert (batch.tokens == mask_id).any()
    assert (batch.targets[batch.tokens == mask_id] != IGNORED).all()
    spans = TextData(path=path, context=40, objective=SpanCorruption())
    batch = first_rows(open_data(spans, tokenizer)[0])
    assert (batch.tokens[:, 0] == tokenizer.bos_id).all()
    assert (batch.source == tokenizer.encode(sentinels[0])[0]).sum() == 2
    with pytest.raises(ClearheadError, match=r"no special token '<extra_id_4>'"):
        open_data(TextData(path=path, context=100, objective=SpanCorruption()), tokenizer)
    with pytest.raises(ClearheadError, match=r"no special token '\[MASK\]'"):
        open_data(TextData(path=path, context=40, objective=Masked()), BYTES)


# --- pairs and chats


def test_multi30k_pairs_are_complete_and_batches_have_little_padding(multi30k):
    files = {
        name: ParallelFiles(source=str(multi30k / f"{name}.en.gz"), target=str(multi30k / f"{name}.de.gz"))
        for name in ("train", "val")
    }
    data = PairData(train=files["train"], validation=files["val"], context=512)
    train_pairs, validation_pairs = open_pairs(data)
    assert (len(train_pairs), len(validation_pairs)) == (29_000, 1_014)
    train, validation = open_data(PairData(train=files["val"], validation=files["val"], context=512), BYTES)
    assert sum(len(batch.tokens) for batch in evaluation_batches(validation, 100)) == 1_014
    batch = first_rows(validation)
    source, target = validation_pairs[0]
    assert decode(batch.source[0]).rstrip("\x00") == source
    assert decode(batch.targets[0]) == target + "</s>"
    assert decode(batch.tokens[0])[:20] == ("<s>" + target)[:20]
    batches = [batch for batch, _ in islice(Loader(train, 64), 15)]
    real = sum(int((batch.targets != IGNORED).sum()) for batch in batches)
    assert real / sum(batch.targets.numel() for batch in batches) > 0.85


def test_translation_drops_pairs_with_an_empty_source(tmp_path):
    (tmp_path / "source").write_text("a\n\n\nb\n")
    (tmp_path / "target").write_text("A\ndropped\n\n\n")
    files = ParallelFiles(source=str(tmp_path / "source"), target=str(tmp_path / "target"))
    train, _ = open_data(PairData(train=files, validation=files, context=8), BYTES)
    batch = first_rows(train, len(train))
    assert [decode(row) for row in batch.source] == ["a", "b"]
    assert [decode(row) for row in batch.targets] == ["A</s>", "</s>"]
    continuations, _ = open_data(PairData(train=files, validation=files, context=8, form="continuation"), BYTES)
    assert len(continuations) == 4


def test_a_table_holds_out_all_rows_of_a_source_together(tmp_path):
    path = tmp_path / "words.tsv"
    rows = [f"word{number}\t{target}" for number in range(300) for target in ("one", "two")]
    path.write_text("\n".join(rows) + "\n")
    train, validation = open_pairs(PairData(train=PairTable(path=str(path)), context=40, validation_share=0.3))
    assert len(train) + len(validation) == 600
    assert 120 < len(validation) < 240
    assert not {source for source, _ in train} & {source for source, _ in validation}


def test_synthetic_data_as_translation_and_as_continuation():
    data = {"task": "addition", "max_length": 2, "num_examples": 50, "num_validation": 5}
    train, validation = open_data(SyntheticData(**data), BYTES)
    assert (len(train), len(validation)) == (50, 5)
    batch = first_rows(train, 50)
    for row in range(50):
        left, right = decode(batch.source[row]).rstrip("\x00").split("+")
        assert decode(batch.targets[row]) == f"{int(left) + int(right)}</s>"
    assert (batch.tokens[:, 0] == BYTES.bos_id).all()
    assert (first_rows(open_data(SyntheticData(**data), BYTES, start=7)[0], 50).tokens[:, 0] == 7).all()
    batch = first_rows(open_data(SyntheticData(**data, form="continuation"), BYTES)[0], 50)
    assert batch.source is None
    has_target = batch.targets != IGNORED
    for row in range(50):
        left, right = decode(batch.tokens[row]).split("<s>")[0].split("+")
        assert decode(batch.targets[row][has_target[row]]) == f"{int(left) + int(right)}</s>"


@pytest.mark.parametrize(
    ("template", "start"), [("<s> $A </s>", "</s>"), ("$A </s>", "<pad>"), ("<s> $A </s>", "<s>"), ("$A", "<s>")]
)
def test_decoder_inputs_equal_shift_tokens_right_of_transformers(tmp_path, template, start):
    """BART, whose targets begin with <s> after the start token; T5; a start with the tokenizer's <s>; no template."""
    (tmp_path / "pairs.tsv").write_text("one\teins drei\ntwo\tzwei eins\n")
    tokenizer = template_tokenizer(template)
    table = PairTable(path=str(tmp_path / "pairs.tsv"))
    data = PairData(train=table, validation=table, context=8)
    start_id = tokenizer._library.token_to_id(start)
    batch = first_rows(open_data(data, tokenizer, start_id)[0])
    target = {"one": "eins drei", "two": "zwei eins"}[tokenizer.decode(batch.source[0].tolist())]
    labels = tokenizer.encode(target)
    labels = labels if labels[-1] == tokenizer.eos_id else [*labels, tokenizer.eos_id]
    labels = labels[1:] if labels[0] == start_id else labels  # the start token is already there
    assert batch.targets[0].tolist() == labels
    assert torch.equal(batch.tokens[:1], shift_tokens_right(torch.tensor([labels]), tokenizer.pad_id, start_id))


def test_chat_targets_are_the_answers(tmp_path):
    tokenizer = byte_tokenizer(SpecialTokens(eos="<|im_end|>"))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    path = tmp_path / "chats.jsonl"
    chats = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}] for n in range(20)]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    train, validation = open_data(ChatData(path=str(path), context=64), tokenizer)
    assert (len(train), len(validation)) == (18, 2)
    targets = first_rows(train, 1).targets[0]
    assert tokenizer.decode(targets[targets != IGNORED].tolist(), skip_special_tokens=False) == "0!<|im_end|>"
    assert list(islice(tokenizer_texts(ChatData(path=str(path), context=64)), 2)) == ["0?", "0!"]


# --- tables


RECIPE = """
[data]
kind = "pair_data"
context = 128
[data.train]
kind = "parallel_files"
source = "train.en"
target = "train.de"
"""


def test_data_tables_survive_toml_and_dict_round_trips():
    from dataclasses import make_dataclass

    recipe = make_dataclass("Recipe", [("data", tables.Data)], frozen=True)
    expected = PairData(context=128, train=ParallelFiles(source="train.en", target="train.de"))
    assert from_toml(recipe, RECIPE).data == expected
    for data in (
        expected,
        TextData(path="a", context=8, objective=SpanCorruption(mean_length=2.0)),
        ShardData(path="a", context=8, rows="packed"),
        ChatData(path="a", context=8),
        SyntheticData(task="copy"),
    ):
        assert from_dict(recipe, to_dict(recipe(data))).data == data


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TextData(path="a", context=0), "TextData.context is 0; it must be a whole number, 1 or more"),
        (lambda: TextData(path="a", context=8, validation_share=1.0), "validation_share is 1.0; it must be between"),
        (lambda: TextData(path="a", context=8, rows="window"), "did you mean 'windows'"),
        (
            lambda: TextData(path="a", context=8, rows="packed", objective=Masked()),
            "packed rows support only the causal objective",
        ),
        (lambda: SyntheticData(task="cpy"), "did you mean 'copy'"),
        (
            lambda: SyntheticData(task="copy", min_length=9, max_length=3),
            r"data\.min_length is 9; it must not exceed data\.max_length, 3",
        ),
        (lambda: TextData(path="a", context=1, objective=SpanCorruption()), "a context of at least 2 tokens"),
        (lambda: SpanCorruption(sentinel="<x>"), "needs a sentinel that contains {}"),
    ],
)
def test_invalid_data_tables_are_rejected(make, message):
    with pytest.raises(ClearheadError, match=message):
        make()


def test_unusable_data_are_rejected(tmp_path):
    empty, short, few, long = (tmp_path / name for name in ("empty.txt", "short.txt", "few.tsv", "long.txt"))
    empty.write_text("\n \n")
    short.write_text("short")
    long.write_text("x" * 100)
    few.write_text("a\tb\n")
    for data, message in (
        (TextData(path=str(empty), context=8), r"empty.txt is empty; training needs at least one token"),
        (TextData(path=str(short), context=64), "the text has 5 tokens, but a row of context 64 needs 65"),
        (
            TextData(path=str(long), context=20),
            "the validation data are too short: the text has 11 tokens, but a row of context 20 needs 21",
        ),
        (TextData(path=str(tmp_path / "absent"), context=8), "absent does not exist"),
        (PairData(train=PairTable(path=str(few)), context=8), "1 pairs are too few to hold out a share of 0.1"),
    ):
        with pytest.raises(ClearheadError, match=message):
            open_data(data, BYTES)
    without_eos = byte_tokenizer(SpecialTokens(pad="<pad>"))
    with pytest.raises(ClearheadError, match="no begin-of-text or end-of-text token"):
        open_data(SyntheticData(task="copy", num_examples=5), without_eos)


def test_targets_of_a_translator_are_encoded_with_the_target_side_of_its_tokenizer(tmp_path):
    """Marian's models segment and normalize the two languages differently; transformers calls the text text_target."""
    write_folder(tmp_path)
    pairs = [(source, target) for source in SENTENCES for target in SENTENCES[:3]]
    clean = [tuple(text.replace("\n", " ").replace("\t", " ") for text in pair) for pair in pairs]
    (tmp_path / "pairs.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in clean), encoding="utf-8")
    ours, theirs = load_marian_tokenizer(tmp_path), MarianTokenizer.from_pretrained(tmp_path)
    table = PairTable(path=str(tmp_path / "pairs.tsv"))
    data = PairData(train=table, validation=table, context=400)
    differing = 0
    for part, dataset in zip(open_pairs(data), open_data(data, ours, start=ours.pad_id), strict=True):
        batch = dataset.batch(np.arange(len(part)), np.zeros(len(part), np.uint64))
        for row, (source, target) in enumerate(part):
            expected = theirs(source, text_target=target)
            labels = [token for token in batch.targets[row].tolist() if token != IGNORED]
            assert labels == expected.labels
            assert batch.tokens[row, 0] == ours.pad_id
            assert batch.source[row].tolist()[: len(expected.input_ids)] == expected.input_ids
            differing += labels != ours.encode(target)
    assert differing  # the two sides do differ
