"""Loading tokenizers: every kind of file, every setting, and invalid files."""

import json
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from clearhead import files
from clearhead.errors import ClearheadError
from clearhead.tokenization.load import load_tokenizer
from tests.tokenization.samples import byte_fallback, byte_level, sentencepiece_model, varied_strings

MODEL = sentencepiece_model(model_type="bpe", normalization_rule_name="identity", remove_extra_whitespaces=False)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tokenizer.json").write_text(byte_level().to_str(), encoding="utf-8")
    return tmp_path


def write(folder, **files):
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / f"{name}.{'jinja' if name == 'chat_template' else 'json'}").write_text(text, encoding="utf-8")


def test_a_bare_tokenizer_json(folder):
    for path in (folder, str(folder), folder / "tokenizer.json"):
        tokenizer = load_tokenizer(path)
        assert tokenizer.encode("The fox") == byte_level().encode("The fox").ids
        assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.chat_template) == (None, None, None)
        assert tokenizer.stop_ids == {0, 2}


def test_settings_are_read_as_transformers_reads_them(folder):
    write(
        folder,
        tokenizer_config={
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": {"content": "<|im_end|>", "__type": "AddedToken"},
            "pad_token": None,
            "chat_template": "in the config",
        },
        generation_config={"eos_token_id": [2, 0], "pad_token_id": 0, "bos_token_id": 1},
    )
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id) == (1, 2)
    assert ours.chat_template == theirs.chat_template == "in the config"
    for text in varied_strings(100):
        assert ours.encode(text) == theirs.encode(text)
    write(folder, chat_template="in its own file")
    assert load_tokenizer(folder).chat_template == "in its own file"
    assert AutoTokenizer.from_pretrained(folder).chat_template == "in its own file"


def test_each_special_token_is_read_from_the_first_file_that_has_it(folder):
    write(
        folder,
        special_tokens_map={"eos_token": "<|im_end|>"},
        generation_config={"pad_token_id": 0, "bos_token_id": -1},
    )
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.bos_id) == (2, 0, None)
    write(folder, generation_config={"eos_token_id": [1, 100]}, special_tokens_map={})
    assert load_tokenizer(folder).eos_id == 1
    assert load_tokenizer(folder).stop_ids == {0, 1, 2, 100}


def test_of_several_templates_the_one_named_default_is_used(folder):
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    write(folder, tokenizer_config={"chat_template": named})
    assert load_tokenizer(folder).chat_template == "d"


def test_tokenizer_json_takes_precedence_over_a_sentencepiece_model(folder):
    (folder / "tokenizer.model").write_bytes(MODEL)
    assert load_tokenizer(folder).vocab_size == byte_level().get_vocab_size()
    (folder / "tokenizer.json").unlink()
    assert load_tokenizer(folder).vocab_size == 600
    (folder / "tokenizer.model").rename(folder / "tokenizer.model.v3")
    assert load_tokenizer(folder / "tokenizer.model.v3").vocab_size == 600


def test_the_folder_of_a_bert_model(minilm):
    ours, theirs = load_tokenizer(minilm), AutoTokenizer.from_pretrained(minilm)
    for text in varied_strings(300):
        assert ours.encode(text) == theirs.encode(text)
    assert ours.pad_id == theirs.pad_token_id


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer": "[]"}, "it contains a list; it must contain a JSON object"),
        ({"tokenizer": ""}, "it is not valid JSON"),
        ({"tokenizer": byte_level().to_str()[:-500]}, "it is not valid JSON"),
        ({"tokenizer": '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}'}, "does not accept it"),
        ({"tokenizer": '{"normalizer": {"type": "Precompiled", "precompiled_charsmap": 0}}'}, "does not accept it"),
        ({"tokenizer_config": "[1]"}, "tokenizer_config.json contains a list; it must contain a JSON object"),
        ({"tokenizer_config": "{"}, "tokenizer_config.json is not valid JSON"),
        ({"tokenizer_config": "[" * 100_000}, "tokenizer_config.json is not valid JSON"),
        ({"tokenizer_config": "1" * 5000}, "tokenizer_config.json is not valid JSON"),
        ({"tokenizer_config": {"eos_token": 5}}, "eos_token is 5"),
        ({"tokenizer_config": {"eos_token": "<none>"}}, "'<none>' is not in the vocabulary"),
        ({"tokenizer_config": {"chat_template": 5}}, "chat template in tokenizer_config.json is not text"),
        ({"tokenizer_config": {"stop_tokens": 5}}, "stop_tokens in tokenizer_config.json"),
        ({"tokenizer_config": {"text_normalizer": {}}}, "text_normalizer in tokenizer_config.json does not match"),
        ({"generation_config": {"eos_token_id": [2, 999_999]}}, "token id 999999, which is not in the vocabulary"),
        ({"generation_config": {"eos_token_id": "x"}}, "token id 'x'"),
        ({"generation_config": {"eos_token_id": -5}}, "token id -5"),
    ],
)
def test_invalid_files_are_rejected(folder, files, message):
    write(folder, **files)
    with pytest.raises(ClearheadError, match=message):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    "files",
    [
        {"special_tokens_map": {"unk_token": "x" * 10**6}},
        {"tokenizer_config": {"eos_token": ["x" * 10**6]}},
        {"tokenizer_config": {"stop_tokens": ["x" * 10**6]}},
        {"generation_config": {"eos_token_id": ["x" * 10**6]}},
    ],
)
def test_the_message_does_not_repeat_a_long_text_of_a_file(folder, files):
    write(folder, **files)
    with pytest.raises(ClearheadError) as caught:
        load_tokenizer(folder)
    assert len(str(caught.value)) < 500 + len(str(folder))


def test_missing_and_unsupported_files_are_reported(tmp_path):
    with pytest.raises(
        ClearheadError, match=r"contains no tokenizer; it must contain one of these files: tokenizer\.json"
    ):
        load_tokenizer(tmp_path)
    with pytest.raises(ClearheadError, match=r"nowhere\.json does not exist"):
        load_tokenizer(tmp_path / "nowhere.json")
    for name, message in [("a.txt", "file type is not supported"), ("a.gguf", "load the file as a checkpoint")]:
        (tmp_path / name).write_text("x")
        with pytest.raises(ClearheadError, match=message):
            load_tokenizer(tmp_path / name)


def test_files_that_are_too_large_are_rejected(folder, monkeypatch):
    monkeypatch.setattr(files, "MAX_BYTES", 100)
    with pytest.raises(ClearheadError, match="at most 100 can be read"):
        load_tokenizer(folder)


def test_text_that_is_not_utf8_is_rejected(folder):
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ClearheadError, match=r"chat_template\.jinja is not UTF-8"):
        load_tokenizer(folder)


NAMES = ["tokenizer.json", "tokenizer.model", "r50k_base.tiktoken", "tokenizer.bin"]
STARTS = {
    "tokenizer.json": byte_fallback().to_str().encode(),
    "tokenizer.model": MODEL,
    "r50k_base.tiktoken": b"IQ== 0\nIg== 1\n",
    "tokenizer.bin": b"\x1b\0\0\0\0\0\0\0\x05\0\0\0<unk>",
}


@pytest.mark.parametrize("name", NAMES)
@given(content=st.binary(max_size=300), start=st.integers(0, 200))
@settings(max_examples=100, deadline=None)
def test_random_bytes_give_an_error_or_a_tokenizer(name, content, start, tmp_path_factory):
    path = tmp_path_factory.mktemp("random") / name
    path.write_bytes(STARTS[name][:start] + content)
    with suppress(ClearheadError):
        load_tokenizer(path).encode("The fox")


CONFIG_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["<|im_end|>", "Ġthe"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["content", "name", "0"]), inner),
    max_leaves=5,
)
KEYS = ["bos_token", "eos_token", "eos_token_id", "pad_token_id", "chat_template", "stop_tokens"]
KEYS += ["added_tokens_decoder", "add_bos_token", "text_normalizer"]


@given(config=st.dictionaries(st.sampled_from(KEYS), CONFIG_VALUES, max_size=4))
@settings(max_examples=150, deadline=None)
def test_random_settings_give_an_error_or_a_tokenizer(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("settings")
    (folder / "tokenizer.json").write_text(byte_level().to_str(), encoding="utf-8")
    write(folder, tokenizer_config=config, generation_config=config)
    with suppress(ClearheadError):
        assert load_tokenizer(folder).encode("The fox")
    (folder / "tokenizer.json").rename(folder / "unused.txt")
    (folder / "tokenizer.model").write_bytes(MODEL)
    with suppress(ClearheadError):
        assert load_tokenizer(folder).encode("The fox")
