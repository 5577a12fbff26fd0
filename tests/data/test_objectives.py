"""Test the objectives against the collator and chat masks of transformers, and the numbers of the papers."""

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

from clearhead.data.batch import IGNORED
from clearhead.data.counter_random import row_keys
from clearhead.data.objectives import (
    causal,
    continuation,
    count_noise,
    masked,
    span_corruption,
    span_corruption_lengths,
    supervised_chat,
    translation,
)
from clearhead.errors import ClearheadError
from clearhead.tokenization.characters import byte_tokenizer
from clearhead.tokenization.library_tokenizer import LibraryTokenizer, SpecialTokens
from clearhead.tokenization.train import train_tokenizer

CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role + '\n' }}"
    "{% if message.role == 'assistant' %}{START}{{ message.content }}<|im_end|>{STOP}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{{ 'assistant\n' }}{% endif %}"
)
MESSAGES = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi!"},
    {"role": "assistant", "content": "Hello, you."},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Nothing more."},
]


def test_causal_shifts_by_one():
    """Book D1: X = text[:, :-1], Y = text[:, 1:]."""
    inputs, targets = causal(np.array([[5, 6, 7, 8]]))
    assert inputs.tolist() == [[5, 6, 7]]
    assert targets.tolist() == [[6, 7, 8]]


def test_translation_and_continuation_shift_the_targets_by_one():
    assert translation([5, 6], start=1, end=2) == ([1, 5, 6], [5, 6, 2])
    assert continuation([8, 9], [5, 6], start=1, end=2) == ([8, 9, 1, 5, 6], [IGNORED, IGNORED, 5, 6, 2])


# --- masked


def masking_shares(inputs, targets, ids, mask_id, special_ids):
    """Return the share of ordinary tokens that are targets, and of these the shares masked, replaced and unchanged."""
    is_target = targets != IGNORED
    shown = inputs[is_target]
    unchanged, is_mask = shown == ids[is_target], shown == mask_id
    return (
        is_target.sum() / (~np.isin(ids, special_ids)).sum(),
        is_mask.mean(),
        (~unchanged & ~is_mask).mean(),
        unchanged.mean(),
    )


def test_masked_has_the_same_statistics_as_the_transformers_collator():
    tokenizer = train_tokenizer(["abcdefgh " * 10], "wordpiece", 60, extra_tokens=["[MASK]"])
    (mask_id,) = tokenizer.encode("[MASK]", add_special_tokens=False)
    special = sorted(tokenizer.special_ids)
    ids = np.random.default_rng(0).integers(0, tokenizer.vocab_size, (400, 128))
    inputs, targets = masked(ids, row_keys(0, 0, np.arange(400)), mask_id, tokenizer.vocab_size, special)
    ours = masking_shares(inputs, targets, ids, mask_id, special)
    assert (targets[np.isin(ids, special)] == IGNORED).all()
    assert (inputs[targets == IGNORED] == ids[targets == IGNORED]).all()

    roles = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer._library, mask_token="[MASK]", **roles)
    torch.manual_seed(0)
    collated = DataCollatorForLanguageModeling(theirs, mlm_probability=0.15)(
        [{"input_ids": row, "special_tokens_mask": np.isin(row, special).astype(int)} for row in ids.tolist()]
    )
    expected = masking_shares(collated["input_ids"].numpy(), collated["labels"].numpy(), ids, mask_id, special)
    np.testing.assert_allclose(ours, expected, atol=0.015)
    np.testing.assert_allclose(ours, [0.15, 0.8, 0.1, 0.1], atol=0.015)


def test_masked_depends_on_the_key_of_each_row_only():
    ids = np.full((3, 50), 7)
    keys = row_keys(0, 0, np.array([1, 2, 1]))
    inputs, targets = masked(ids, keys, 4, 99, {4})
    assert (inputs[0] == inputs[2]).all()
    assert (targets[0] != targets[1]).any()


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(0, 100))
def test_masked_has_a_target_unless_all_tokens_are_special(length, key):
    _, targets = masked(np.full((1, length), 7), row_keys(0, 0, np.array([key])), 4, 99, {4})
    assert (targets != IGNORED).any()
    _, special_targets = masked(np.full((1, length), 4), row_keys(0, 0, np.array([key])), 4, 99, {4})
    assert (special_targets == IGNORED).all()


# --- spans

SENTINELS = list(range(1000, 900, -1))


def reconstruct(inputs, answer):
    """Reconstruct the original ids from the inputs and the answer."""
    spans, current = {}, None
    for token in answer[:-1]:
        if token in SENTINELS:
            current = spans[token] = []
        else:
            current.append(token)
    return [piece for token in inputs[:-1] for piece in spans.get(token, [token])]


@settings(deadline=None)
@given(st.integers(2, 200), st.integers(0, 2**32), st.floats(0.05, 0.5), st.floats(1, 6))
def test_inputs_and_answer_of_span_corruption_reconstruct_the_text(length, key, share, mean_length):
    ids = np.arange(length) + 2000
    inputs, answer = span_corruption(ids, row_keys(0, 0, np.array([key]))[0], SENTINELS, 1, share, mean_length)
    assert inputs[-1] == answer[-1] == 1
    assert (len(inputs), len(answer)) == span_corruption_lengths(length, share, mean_length)
    assert reconstruct(inputs.tolist(), answer.tolist()) == ids.tolist()
    used = [token for token in answer.tolist() if token in SENTINELS]
    assert used == SENTINELS[: len(used)] == [token for token in inputs.tolist() if token in SENTINELS]


def test_span_corruption_has_the_lengths_of_t5():
    """Raffel et al. 2020, §3.1.4 and §3.3.4: 15 % of the tokens, in spans of 3 on average.

    Their code reads 568 tokens for inputs of 512 and targets of 114, end tokens included.
    """
    assert count_noise(568) == (85, 28)
    inputs, answer = span_corruption(np.arange(568), row_keys(0, 0, np.array([0]))[0], SENTINELS, 1)
    assert (len(inputs), len(answer)) == (512, 114)


def test_spans_occur_at_every_position_with_various_lengths():
    hidden = np.zeros(100)
    lengths = set()
    for key in row_keys(0, 0, np.arange(2000)):
        _, answer = span_corruption(np.arange(100), key, SENTINELS, end=-1)
        borders = [index for index, token in enumerate(answer) if token in SENTINELS] + [len(answer) - 1]
        lengths |= set(np.diff(borders) - 1)
        hidden[[token for token in answer if 0 <= token < 100]] += 1
    assert {1, 2, 3, 4, 5, 6, 7} <= lengths
    assert hidden[0] == 0  # the first token is always kept, as in T5
    assert abs(hidden[10:90] / 2000 - 0.15).max() < 0.05


def test_span_corruption_rejects_a_tokenizer_with_too_few_sentinels():
    with pytest.raises(ClearheadError, match="100 tokens needs 5 sentinels, but the tokenizer has only 2"):
        span_corruption(np.arange(100), row_keys(0, 0, np.array([0]))[0], [7, 8], 1)


# --- chats


def chat_tokenizer(template):
    tokenizer = byte_tokenizer(SpecialTokens(eos="<|im_end|>", stops=("<|im_start|>",)))
    tokenizer.chat_template = template.replace("{START}", "").replace("{STOP}", "")
    return tokenizer


def llama_tokenizer(template):
    """Return a tokenizer that adds a space before the text, as SentencePiece does."""
    words = [message["content"] for message in MESSAGES] + ["user assistant system"]
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
    library.decoder = tokenizers.decoders.Metaspace(prepend_scheme="first")
    letters = sorted(set("".join(words) + "▁\n"))
    marks = ["<|im_start|>", "<|im_end|>"]
    trainer = tokenizers.trainers.BpeTrainer(special_tokens=marks, initial_alphabet=letters, show_progress=False)
    library.train_from_iterator(words, trainer)
    tokenizer = LibraryTokenizer(library, SpecialTokens(eos="<|im_end|>", stops=("<|im_start|>",)))
    tokenizer.chat_template = template.replace("{START}", "").replace("{STOP}", "")
    return tokenizer


@pytest.mark.parametrize("kind", [chat_tokenizer, llama_tokenizer])
def test_supervised_chat_targets_equal_the_assistant_mask_of_transformers(kind):
    tokenizer = kind(CHAT)
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer._library)
    theirs.chat_template = CHAT.replace("{START}", "{% generation %}").replace("{STOP}", "{% endgeneration %}")
    expected = theirs.apply_chat_template(MESSAGES, return_dict=True, return_assistant_tokens_mask=True)
    inputs, targets = supervised_chat(tokenizer, MESSAGES)
    assert inputs == expected["input_ids"][:-1]
    mask = expected["assistant_masks"]
    labels = [token if marked else IGNORED for token, marked in zip(expected["input_ids"], mask, strict=True)]
    assert targets == labels[1:]
    assert tokenizer.decode([token for token in targets if token != IGNORED], skip_special_tokens=False) == (
        "Hello, you.<|im_end|>Nothing more.<|im_end|>"
    )


def test_supervised_chat_drops_messages_after_the_last_answer():
    tokenizer = chat_tokenizer(CHAT)
    assert supervised_chat(tokenizer, MESSAGES[:4]) == supervised_chat(tokenizer, MESSAGES[:3])


def test_a_first_message_of_the_assistant_is_input_but_not_a_target():
    tokenizer = chat_tokenizer(CHAT)
    greeting = {"role": "assistant", "content": "Welcome."}
    inputs, targets = supervised_chat(tokenizer, [greeting, *MESSAGES[1:3]])
    assert "Welcome.<|im_end|>" in tokenizer.decode(inputs, skip_special_tokens=False)
    answer = [token for token in targets if token != IGNORED]
    assert tokenizer.decode(answer, skip_special_tokens=False) == "Hello, you.<|im_end|>"
    with pytest.raises(ClearheadError, match="no assistant message after another message"):
        supervised_chat(tokenizer, [greeting])


def test_a_chat_without_an_answer_and_a_template_that_rewrites_are_rejected():
    with pytest.raises(ClearheadError, match="no assistant message after another message"):
        supervised_chat(chat_tokenizer(CHAT), MESSAGES[:2])
    rewriting = "{{ messages | length }}" + CHAT
    with pytest.raises(ClearheadError, match="rewrites earlier messages"):
        supervised_chat(chat_tokenizer(rewriting), MESSAGES)
