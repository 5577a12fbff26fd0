"""Test reading preferences in all their forms, and the batches that are made of them."""

import json

import numpy as np
import pytest
import torch

from clearhead.data.batch import IGNORED
from clearhead.data.config import PreferenceData
from clearhead.data.open import open_data, tokenizer_texts
from clearhead.data.preferences import Preferences, read_preferences
from clearhead.errors import ClearheadError
from clearhead.tokenization import SpecialTokens, byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
USER, YES, NO = ({"role": r, "content": c} for r, c in (("user", "Hi"), ("assistant", "Yes"), ("assistant", "No, no")))
FORMS = {
    "texts": {"prompt": "Hi", "chosen": "Yes", "rejected": "No, no"},
    "messages": {"messages": [USER], "chosen": [YES], "rejected": [NO]},
    "prompt of messages": {"prompt": [USER], "chosen": YES, "rejected": "No, no"},
    "answers repeat the prompt": {"prompt": "Hi", "chosen": [USER, YES], "rejected": [USER, NO]},
    "no prompt": {"chosen": [USER, YES], "rejected": [USER, NO]},
}


def tokenizer():
    made = byte_tokenizer(SpecialTokens(bos="<s>", eos="</s>", pad="<pad>", unknown="<unk>"))
    made.chat_template = TEMPLATE
    return made


def write(path, *entries):
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_preference(tmp_path, form):
    (found,) = read_preferences(write(tmp_path / "x.jsonl", FORMS[form]))
    assert (list(found.prompt), list(found.chosen), list(found.rejected)) == ([USER], [YES], [NO])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"prompt": "Hi", "chosen": "Yes"}, 'line 1 of .* has no "rejected" answer; its keys are: prompt, chosen'),
        ({"chosen": "Yes", "rejected": "No"}, "has no valid prompt"),
        ({"prompt": [USER, YES], "chosen": "Yes", "rejected": "No"}, "has no valid prompt"),
        ({"prompt": "Hi", "chosen": "Yes", "rejected": "Yes"}, "has equal answers"),
        ({"prompt": "Hi", "chosen": [USER, USER, YES], "rejected": "No"}, "must have one message of the assistant"),
        ({"prompt": "Hi", "chosen": [], "rejected": "No"}, "must have one message of the assistant"),
        ({"prompt": "Hi", "chosen": 3, "rejected": "No"}, 'needs "chosen": a list of objects with a role'),
        ({"prompt": 3, "chosen": "Yes", "rejected": "No"}, 'needs "prompt": a list of objects with a role'),
    ],
)
def test_a_line_without_a_preference_is_rejected(tmp_path, entry, message):
    with pytest.raises(ClearheadError, match=message):
        read_preferences(write(tmp_path / "x.jsonl", entry))


def test_an_absent_and_an_empty_file_are_rejected(tmp_path):
    with pytest.raises(ClearheadError, match="does not exist; give a JSON lines file of preferences"):
        read_preferences(tmp_path / "none.jsonl")
    with pytest.raises(ClearheadError, match="is empty"):
        read_preferences(write(tmp_path / "x.jsonl"))


def test_only_the_answers_are_targets_and_rows_come_in_pairs(tmp_path):
    earlier = [USER, {"role": "assistant", "content": "Earlier"}, {"role": "user", "content": "And?"}]
    path = write(tmp_path / "x.jsonl", {"messages": earlier, "chosen": [YES], "rejected": [NO]}, FORMS["texts"])
    made = tokenizer()
    dataset = Preferences(read_preferences(path), made, made.pad_id, context=100)
    rows = np.array([1, 0])
    batch = dataset.batch(rows, rows.astype(np.uint64))
    answers = [[token for token in row if token != IGNORED] for row in batch.targets.tolist()]
    assert [made.decode(row, skip_special_tokens=False) for row in answers] == ["Yes</s>", "No, no</s>"] * 2
    text = made.decode(batch.tokens[2][batch.mask[2]].tolist(), skip_special_tokens=False)
    assert text == "u:Hi</s>a:Earlier</s>u:And?</s>a:Yes"
    assert batch.num_losses == 2
    assert batch.num_targets == 2 * (4 + 7)
    assert dataset.lengths.tolist() == [batch.tokens.shape[1], int(batch.mask[1].sum())]


def test_a_pair_without_targets_has_no_loss(tmp_path):
    made = tokenizer()
    preferences = read_preferences(write(tmp_path / "x.jsonl", *[FORMS["texts"]] * 2))
    batch = Preferences(preferences, made, made.pad_id, context=50).batch(np.arange(2), np.arange(2, dtype=np.uint64))
    batch.targets[3] = IGNORED
    assert batch.has_loss.tolist() == [True, False]
    assert batch.to("cpu").num_losses == 1
    assert torch.equal(batch.to("cpu").targets, batch.targets)


def test_pairs_longer_than_the_context_are_dropped_together(tmp_path):
    long = {"prompt": "Hi", "chosen": "Yes", "rejected": "No" * 50}
    path = write(tmp_path / "x.jsonl", *[FORMS["texts"], long] * 10)
    train, validation = open_data(PreferenceData(path=str(path), context=40), tokenizer())
    assert (len(train), train.num_too_long, len(validation)) == (9, 9, 1)
    with pytest.raises(ClearheadError, match=r"none of the 18 preferences fits data\.context 4; the shortest has"):
        open_data(PreferenceData(path=str(path), context=4), tokenizer())


def test_validation_data_and_texts_for_a_tokenizer(tmp_path):
    path, other = write(tmp_path / "x.jsonl", FORMS["texts"]), write(tmp_path / "y.jsonl", *[FORMS["texts"]] * 3)
    data = PreferenceData(path=str(path), context=50, validation_path=str(other))
    train, validation = open_data(data, tokenizer())
    assert (len(train), len(validation)) == (1, 3)
    assert list(tokenizer_texts(data)) == ["Hi", "Yes", "No, no"]
    with pytest.raises(ClearheadError, match=r"1 preferences are too few to hold out a share of 0\.1"):
        open_data(PreferenceData(path=str(path), context=50), tokenizer())
