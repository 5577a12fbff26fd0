"""Test the formats of instruction data, in JSON lines and CSV."""

import json

import pytest

from clearhead.data.chats import to_messages
from clearhead.data.sources import read_chats, read_table
from clearhead.errors import ClearheadError

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@pytest.mark.parametrize(
    "entry",
    [
        {"messages": CHAT},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"instruction": "Hi", "output": "Hello"},
        {"instruction": "Hi", "input": "", "output": "Hello"},
        {"prompt": "Hi", "completion": "Hello"},
        {"prompt": "Hi", "response": "Hello"},
        {"question": "Hi", "answer": "Hello", "source": "elsewhere"},
    ],
)
def test_every_format_gives_the_same_chat(entry):
    assert list(to_messages(entry, "line 1")) == CHAT


def test_an_input_follows_its_instruction_and_a_system_message_comes_first():
    entry = {"system": "Be brief.", "instruction": "Translate.", "input": "a cat", "output": "un chat"}
    assert [message["content"] for message in to_messages(entry, "line 1")] == [
        "Be brief.",
        "Translate.\n\na cat",
        "un chat",
    ]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"messages": "Hi"}, 'line 1 needs "messages": a list of objects with a role and a content'),
        ({"messages": [{"role": "user"}]}, 'line 1 needs "messages"'),
        ({"conversations": [{"from": "human"}]}, 'line 1 needs "conversations"'),
        ({"conversations": ["Hi"]}, 'line 1 needs "conversations": a list of objects with "from" and "value"'),
        ({"text": "Hi"}, "or a question .* and an answer .*; its keys are: text"),
        ({"prompt": "Hi", "completion": 3}, "must have texts under 'prompt' and 'completion'"),
    ],
)
def test_an_entry_without_a_chat_is_rejected(entry, message):
    with pytest.raises(ClearheadError, match=message):
        to_messages(entry, "line 1")


def test_a_csv_file_with_quoted_cells_is_read(tmp_path):
    (tmp_path / "chats.csv").write_text('prompt,completion\nHi,Hello\n\n"Two\nlines, quoted","He said ""yes""."\n')
    chats = read_chats(tmp_path / "chats.csv")
    assert list(chats[0]) == CHAT
    assert [message["content"] for message in chats[1]] == ["Two\nlines, quoted", 'He said "yes".']


def test_a_folder_of_chats_may_mix_formats(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,completion\nHi,Hello\n")
    (tmp_path / "b.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    assert [list(chat) for chat in read_chats(tmp_path)] == [CHAT, CHAT]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt,completion\nHi\n", "line 2 of .* has 1 cells, but the first line has 2"),
        ('prompt,completion\nHi,"Hello\n', "is not valid CSV"),
        ("prompt,completion\nHi," + "x" * 200_000 + "\n", "is not valid CSV: field larger than field limit"),
        ("prompt,completion\n", "is empty"),
    ],
)
def test_a_damaged_csv_file_is_rejected(tmp_path, text, message):
    (tmp_path / "chats.csv").write_text(text)
    with pytest.raises(ClearheadError, match=message):
        read_chats(tmp_path / "chats.csv")


def test_a_table_may_be_csv_and_have_a_header(tmp_path):
    (tmp_path / "pairs.csv").write_text('english,german\n"a cat, a dog",eine Katze\n')
    assert read_table(tmp_path / "pairs.csv", header=True) == [("a cat, a dog", "eine Katze")]
    assert len(read_table(tmp_path / "pairs.csv")) == 2
