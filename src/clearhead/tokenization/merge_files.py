"""Read a byte-level BPE tokenizer from vocab.json and merges.txt, as GPT-2, RoBERTa, BART and OPT were first published.

tokenizer = load_merge_files(Path("gpt2"))   # a folder with both files

The files are turned into a tokenizer.json, which is then checked and loaded as any other.
"""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from clearhead.errors import ClearheadError, quote
from clearhead.files import MAX_JSON_TABLE_BYTES, read_json, read_json_object, read_text
from clearhead.tokenization.library_tokenizer import LibraryTokenizer, SpecialTokens, convert_library_errors
from clearhead.tokenization.settings import TokenizerSettings
from clearhead.tokenization.tokenizer_limits import parse_tokenizer_json

VOCABULARY_FILE, MERGES_FILE = "vocab.json", "merges.txt"
_MASK, _END_OF_TEXT = "<mask>", "<|endoftext|>"
_END_OF_WORD = "</w>"  # in the vocabularies of GPT-1 and CLIP, which are not byte-level
# Classes whose tokenizers put <s> before a text and </s> after it; others add nothing, or bos with add_bos_token.
_FRAMING_CLASSES = ("Roberta", "Bart", "LED", "Longformer", "Blenderbot")


def has_merge_files(folder: Path) -> bool:
    """Return whether a folder has both files."""
    return (folder / VOCABULARY_FILE).is_file() and (folder / MERGES_FILE).is_file()


def load_merge_files(folder: Path) -> LibraryTokenizer:
    """Return the tokenizer of a folder with vocab.json and merges.txt."""
    vocabulary = _read_vocabulary(folder / VOCABULARY_FILE)
    merges = _read_merges(folder / MERGES_FILE)
    settings = TokenizerSettings.read(folder)
    added = {token: AddedToken(token) for token in read_json_object(folder / "added_tokens.json")}
    ids = vocabulary | read_json_object(folder / "added_tokens.json")
    listed = settings.added_tokens()
    ids |= {token.content: token_id for token_id, token in listed.items()}
    texts = {token_id: token for token, token_id in ids.items()}
    frames = _frames_texts(vocabulary, settings)
    special = settings.special_tokens(texts.get, _default_special_tokens(vocabulary, frames))
    names = [*special.present(), *([_MASK] if frames else []), *added, *[token.content for token in listed.values()]]
    special_ids = {name: ids[name] for name in names if name in ids}
    content = json.dumps(_describe(vocabulary, merges, settings, special, special_ids, frames))
    parse_tokenizer_json(content.encode())
    with convert_library_errors("the tokenizers library does not accept it"):
        library = tokenizers.Tokenizer.from_str(content)
    return LibraryTokenizer(library, special, settings.chat_template())


def _read_vocabulary(path: Path) -> dict[str, int]:
    vocabulary = read_json(path, MAX_JSON_TABLE_BYTES)
    if not isinstance(vocabulary, dict) or not all(type(token_id) is int for token_id in vocabulary.values()):
        raise ClearheadError(f"{path.name} must hold an object from tokens to ids")
    return vocabulary


def _read_merges(path: Path) -> list[list[str]]:
    lines = read_text(path).split("\n")
    pairs = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    wrong = next((pair for pair in pairs if len(pair) != 2), None)
    if wrong is not None:
        raise ClearheadError(f"{path.name} has the line {quote(' '.join(wrong))}; a line must have two tokens")
    if any(second.endswith(_END_OF_WORD) for _, second in pairs):
        raise ClearheadError(
            f"{path.name} merges letters up to the end of a word, not bytes; save the tokenizer as tokenizer.json first"
        )
    return pairs


def _frames_texts(vocabulary: dict[str, int], settings: TokenizerSettings) -> bool:
    """Return whether the tokenizer is one like RoBERTa's, with <s> before and </s> after a text, and a mask."""
    class_name = settings.tokenizer_config.get("tokenizer_class")
    if class_name is None:
        return "<s>" in vocabulary and _END_OF_TEXT not in vocabulary
    return isinstance(class_name, str) and class_name.startswith(_FRAMING_CLASSES)


def _default_special_tokens(vocabulary: dict[str, int], frames: bool) -> SpecialTokens:
    """Return the special tokens of folders that name none: those of RoBERTa, or those of GPT-2."""
    if frames:
        return SpecialTokens(bos="<s>", eos="</s>", pad="<pad>", unknown="<unk>")
    if _END_OF_TEXT in vocabulary:
        return SpecialTokens(bos=_END_OF_TEXT, eos=_END_OF_TEXT, unknown=_END_OF_TEXT)
    return SpecialTokens()


def _describe(
    vocabulary: dict[str, int],
    merges: list[list[str]],
    settings: TokenizerSettings,
    special: SpecialTokens,
    added: dict[str, int],
    frames: bool,
) -> dict[str, Any]:
    """Return the tokenizer.json of a byte-level BPE."""
    config = settings.tokenizer_config
    prefix_space = config.get("add_prefix_space") is True
    byte_level = {"type": "ByteLevel", "add_prefix_space": prefix_space, "trim_offsets": True, "use_regex": True}
    first = special.bos if frames or settings.adds_token("bos") else None
    last = special.eos if frames or settings.adds_token("eos") else None
    if frames and first in vocabulary and last in vocabulary:
        ends = {"sep": [last, vocabulary[str(last)]], "cls": [first, vocabulary[str(first)]]}
        processor = {"type": "RobertaProcessing", **ends, "trim_offsets": True, "add_prefix_space": prefix_space}
    else:
        processor = _template(first, last, vocabulary)
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": token_id, "content": token, "single_word": False, "lstrip": False, "rstrip": False}
            | {"normalized": False, "special": True}
            for token, token_id in sorted(added.items(), key=lambda item: item[1])
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": processor,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocabulary,
            "merges": merges,
        },
    }


def _template(first: str | None, last: str | None, vocabulary: dict[str, int]) -> dict[str, Any]:
    """Return the post-processor that puts `first` before a text and `last` after it, where they are given."""
    tokens = [token for token in (first, last) if token is not None]
    unknown = next((token for token in tokens if token not in vocabulary), None)
    if unknown is not None:
        raise ClearheadError(f"the special token {quote(unknown)} is not in {VOCABULARY_FILE}")
    ends = [[{"SpecialToken": {"id": token, "type_id": 0}}] if token else [] for token in (first, last)]
    texts = [{"Sequence": {"id": name, "type_id": 0}} for name in ("A", "B")]
    return {
        "type": "TemplateProcessing",
        "single": [*ends[0], texts[0], *ends[1]],
        "pair": [*ends[0], *texts, *ends[1]],
        "special_tokens": {token: {"id": token, "ids": [vocabulary[token]], "tokens": [token]} for token in tokens},
    }
