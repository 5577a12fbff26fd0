"""Test what `clearhead info` reads of a model without loading it: little memory, and no pipe or device."""

import json
import os

import pytest

from clearhead.catalog import has_chat_template, installed
from clearhead.errors import ClearheadError


def test_a_folder_has_a_template_in_one_of_two_files(tmp_path):
    assert not has_chat_template(tmp_path)
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert has_chat_template(tmp_path)
    settings.write_text(json.dumps({"chat_template": None}))
    assert not has_chat_template(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert has_chat_template(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b'{"chat_template": "x", "a": "' + b"a" * (1 << 23) + b'"}'])
def test_damaged_and_huge_settings_have_no_template(tmp_path, content):
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    assert not has_chat_template(tmp_path)


def test_a_pipe_in_place_of_the_settings_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "tokenizer_config.json")
    assert not has_chat_template(tmp_path)
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(ClearheadError, match="is not a regular file but a pipe"):
        has_chat_template(tmp_path / "model.gguf")


@pytest.mark.parametrize("start", [0, 90, 95, 99, 150])
def test_the_key_in_a_gguf_file_is_found_across_the_border_of_two_reads(tmp_path, monkeypatch, start):
    monkeypatch.setattr(installed, "_CHUNK_BYTES", 100)
    path = tmp_path / "model.gguf"
    path.write_bytes(b"a" * start + b"tokenizer.chat_template" + b"b" * 200)
    assert has_chat_template(path)
    path.write_bytes(b"a" * start + b"tokenizer.chat_templat" + b"b" * 200)
    assert not has_chat_template(path)
    path.write_bytes(b"")
    assert not has_chat_template(path)


def test_the_key_is_searched_at_the_beginning_only(tmp_path, monkeypatch):
    monkeypatch.setattr(installed, "_CHUNK_BYTES", 100)
    monkeypatch.setattr(installed, "_MAX_HEADER_BYTES", 300)
    path = tmp_path / "model.gguf"
    path.write_bytes(b"a" * 1000 + b"tokenizer.chat_template")
    assert not has_chat_template(path)
