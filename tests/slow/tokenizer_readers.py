"""Tokenizer files, and everything beside them: a small valid example of each kind, and a function that uses it.

makers = build_tokenizer_kinds(); files, read = makers["tokenizer.json of words"](folder)
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sentencepiece import sentencepiece_model_pb2

from clearhead.checkpoint.gguf import open_gguf
from clearhead.checkpoint.gguf_writer import write_gguf
from clearhead.tokenization import (
    StreamDecoder,
    load_marian_tokenizer,
    load_tokenizer,
    render_chat,
    tokenizer_from_gguf,
)
from clearhead.tokenization.conversation import read_conversation, write_conversation
from clearhead.tokenization.tiktoken import read_rank_file
from tests.tokenization import samples
from tests.tokenization.test_llama2c import export_tokenizer_bin
from tests.tokenization.test_marian import write_folder
from tests.tokenization.test_tiktoken import RANKS, rank_file

Maker = Callable[[Path], tuple[dict[str, str], Callable[[Path, str, bool], object]]]

TEXTS = ["", "Hello, world 123!", "  漢字 é👍\n\t<|im_start|></s>", "a" * 60]
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is a Transformer?"},
    {"role": "assistant", "content": "A network."},
    {"role": "user", "content": 'And "attention"?'},
]
CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nYou help."
    "<|im_end|>\n{% endif %}{{ '<|im_start|>' + message.role + '\n' + message.content|trim + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BLOCKS = (
    "{%- set ns = namespace(turn=0) -%}{%- if messages[0].role == 'system' -%}{%- set first = messages[0].content -%}"
    "{%- set rest = messages[1:] -%}{%- else -%}{%- set first = '' -%}{%- set rest = messages -%}{%- endif -%}"
    "{%- macro tag(name) -%}[{{ name|upper }}]{%- endmacro -%}{{ bos_token }}{%- for m in rest -%}"
    "{%- if m.role not in ['user', 'assistant'] -%}{{ raise_exception('unknown role ' ~ m.role) }}{%- endif -%}"
    "{%- set ns.turn = ns.turn + 1 -%}{{ tag(m.role) }} {{ (first ~ '\n' if loop.index0 == 0 else '') ~ m['content'] }}"
    "{%- if m.role == 'assistant' -%}{{ eos_token }}{%- endif -%}{%- endfor -%}{{ ns.turn|string|replace('1', 'one') }}"
    "{{ messages|map(attribute='role')|join(',') }} {{ range(3)|list|tojson }}"
)


def use_tokenizer(tokenizer: Any) -> None:
    """Encode and decode as a user would."""
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert all(isinstance(token, int) for token in ids)
        tokenizer.decode(ids).encode(errors="strict")
        tokenizer.decode(ids, skip_special_tokens=False)
        stream = StreamDecoder(tokenizer)
        for token in ids[:20]:
            stream.push(token)
    assert tokenizer.vocab_size >= 0
    assert tokenizer.stop_ids is not None


def read_tokenizer(folder: Path, name: str, unchanged: bool) -> None:
    use_tokenizer(load_tokenizer(folder))


def read_template(folder: Path, name: str, unchanged: bool) -> None:
    tokenizer = load_tokenizer(folder)
    if tokenizer.chat_template is not None:
        render_chat(tokenizer, MESSAGES, add_generation_prompt=True)


def build_tokenizer_kinds() -> dict[str, Maker]:
    """Return what writes each kind of tokenizer file."""
    libraries = {
        "bytes": samples.byte_level,
        "pieces": samples.metaspace_unigram,
        "words": samples.wordpiece,
        "byte fallback": samples.byte_fallback,
        "word ends": samples.word_ends,
    }
    return {
        **{f"tokenizer.json of {name}": _make_library(build) for name, build in libraries.items()},
        "tokenizer_config.json": _make_settings,
        "sentencepiece": _make_sentencepiece,
        "gguf unigram vocabulary": _make_gguf_unigram,
        "tiktoken": _make_tiktoken,
        "tokenizer.bin": _make_file("tokenizer.bin", export_tokenizer_bin, "binary"),
        "marian vocabulary": _make_marian,
        "chat template": _make_template(CHATML),
        "chat template with blocks": _make_template(BLOCKS),
        "conversation": _make_conversation,
    }


def _make_library(build: Callable[[], Any]) -> Maker:
    def make(folder: Path) -> Any:
        build().save(str(folder / "tokenizer.json"))
        return {"tokenizer.json": "json"}, read_tokenizer

    return make


def _write_settings(folder: Path, template: str | None) -> None:
    samples.byte_level().save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": "<|endoftext|>",
        "eos_token": {"content": "<|im_end|>", "lstrip": False, "normalized": False, "special": True},
        "pad_token": None,
        "add_bos_token": False,
        "added_tokens_decoder": {"0": {"content": "<|endoftext|>", "special": True}},
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_end|>", "unk_token": None}))


def _make_settings(folder: Path) -> Any:
    _write_settings(folder, CHATML)

    def read(folder: Path, name: str, unchanged: bool) -> None:
        read_tokenizer(folder, name, unchanged)
        read_template(folder, name, unchanged)

    return {"tokenizer_config.json": "json", "special_tokens_map.json": "json"}, read


def _make_template(template: str) -> Maker:
    def make(folder: Path) -> Any:
        _write_settings(folder, None)
        (folder / "chat_template.jinja").write_text(template)
        return {"chat_template.jinja": "text"}, read_template

    return make


def _make_sentencepiece(folder: Path) -> Any:
    content = samples.sentencepiece_model(model_type="unigram", normalization_rule_name="nmt_nfkc")
    (folder / "tokenizer.model").write_bytes(content)
    return {"tokenizer.model": "binary"}, read_tokenizer


def _make_gguf_unigram(folder: Path) -> Any:
    content = samples.sentencepiece_model(model_type="unigram", normalization_rule_name="nmt_nfkc")
    model = sentencepiece_model_pb2.ModelProto.FromString(content)
    values = {
        "model": "t5",
        "tokens": [piece.piece for piece in model.pieces],
        "scores": [piece.score for piece in model.pieces],
        "token_type": [piece.type for piece in model.pieces],
        "precompiled_charsmap": list(model.normalizer_spec.precompiled_charsmap),
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    metadata = {"general.architecture": "t5"} | {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    write_gguf(folder / "vocabulary.gguf", metadata, [])

    def read(folder: Path, name: str, unchanged: bool) -> None:
        use_tokenizer(tokenizer_from_gguf(open_gguf(folder / name).metadata))

    return {"vocabulary.gguf": "header"}, read


def _make_file(name: str, build: Callable[[], bytes], form: str) -> Maker:
    def make(folder: Path) -> Any:
        (folder / name).write_bytes(build())
        return {name: form}, read_tokenizer

    return make


def _make_tiktoken(folder: Path) -> Any:
    (folder / "small.tiktoken").write_bytes(rank_file(RANKS))

    def read(folder: Path, name: str, unchanged: bool) -> None:
        special = {"<|endoftext|>": 700}
        use_tokenizer(read_rank_file((folder / name).read_bytes(), encoding="cl100k", special_tokens=special))

    return {"small.tiktoken": "text"}, read


def _make_marian(folder: Path) -> Any:
    write_folder(folder)

    def read(folder: Path, name: str, unchanged: bool) -> None:
        tokenizer = load_marian_tokenizer(folder)
        use_tokenizer(tokenizer)
        tokenizer.encode_target("Hello")

    return {"vocab.json": "json", "source.spm": "binary", "target.spm": "binary"}, read


def _make_conversation(folder: Path) -> Any:
    write_conversation(folder / "talk.json", MESSAGES)
    return {"talk.json": "json"}, lambda folder, name, unchanged: read_conversation(folder / name)
