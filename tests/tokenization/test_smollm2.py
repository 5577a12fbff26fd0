"""The tokenizer in the real SmolLM2 GGUF file, compared with the one that transformers builds from the same file."""

import pytest
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from clearhead.checkpoint.gguf import open_gguf
from clearhead.tokenization.chat_template import render_chat
from clearhead.tokenization.gguf_vocabulary import tokenizer_from_gguf
from clearhead.tokenization.interface import StreamDecoder
from tests.tokenization.samples import varied_strings

STRINGS = varied_strings(1000, seed=9, also=("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>"))
MESSAGES = [
    {"role": "user", "content": "What is  2 + 2?\n"},
    {"role": "assistant", "content": "4, naïvely 👍"},
    {"role": "user", "content": "Thanks."},
]


@pytest.fixture(scope="module")
def ours(smollm2_gguf):
    return tokenizer_from_gguf(open_gguf(smollm2_gguf).metadata)


@pytest.fixture(scope="module")
def theirs(smollm2_gguf):
    return AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)


def test_special_tokens_are_equal(ours, theirs):
    assert (ours.bos_id, ours.eos_id, ours.pad_id, ours.unknown_id) == (1, 2, 2, 0)
    assert ours.vocab_size == len(theirs) == 49_152
    assert {theirs.bos_token_id, theirs.eos_token_id, theirs.unk_token_id} <= ours.special_ids
    assert ours.stop_ids == {0, 2}


def test_ids_and_texts_are_equal(ours, theirs, monkeypatch):
    # transformers does not know this file's pre-tokenizer, smollm, and splits as GPT-2 does. SmolLM2's own
    # tokenizer.json first isolates each digit.
    published = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    monkeypatch.setattr(theirs.backend_tokenizer, "pre_tokenizer", pre_tokenizers.Sequence(published))
    for text in STRINGS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)


def test_ids_of_texts_without_digits_equal_those_of_unmodified_transformers(ours, theirs):
    without_numbers = [text for text in STRINGS if not any(map(str.isnumeric, text))]
    assert len(without_numbers) > 300
    for text in without_numbers:
        assert ours.encode(text) == theirs.encode(text), text


def test_streamed_texts_are_equal(ours, theirs):
    for text in STRINGS[:300]:
        ids = ours.encode(text)
        decoder = StreamDecoder(ours)
        assert "".join(map(decoder.push, ids)) + decoder.finish() == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chats_are_equal(ours, theirs, add_generation_prompt):
    for messages in (MESSAGES, [{"role": "system", "content": "Be brief."}, *MESSAGES]):
        prompt = render_chat(ours, messages, add_generation_prompt=add_generation_prompt)
        options = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
        assert prompt == theirs.apply_chat_template(messages, **options)
