"""Limits of what a tokenizer file may ask of the `tokenizers` library, checked before the library reads the file.

    content = parse_tokenizer_json(Path("tokenizer.json").read_bytes())   # raises ClearheadError

The steps of a tokenizer are a small program: 28 steps that each write `aa` for `a` turn a letter into 268 million. The
library runs it without limits and ends the process if its memory does not suffice. So the number of steps is limited,
the factor by which all of them together can lengthen a text, the length of their texts, patterns and vocabulary, and
the number of values in the file. What is within the limits takes a time proportional to the text, except that a
pattern may take quadratic time; the library itself gives up after ten million attempts at one position.
"""

import base64
import binascii
import json
from collections.abc import Iterable, Iterator, Mapping
from math import ceil
from typing import Any

from clearhead.errors import ClearheadError, quote, shorten

# Gemma's tokenizer.json, the largest of the common ones, has 1.4 million commas and 0.5 million brackets.
_MAX_COMMAS = 1 << 22
_MAX_BRACKETS = 1 << 21
# The key of each kind of step in tokenizer.json, and the key under which a sequence holds its steps
_STEPS = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}
_MAX_STEPS = 64
_MAX_DEPTH = 8
# Compiling this much takes the library about a second and 350 MB at worst; Gemma's pattern of all tokens has 60,000.
_MAX_PATTERN_CHARACTERS = 1 << 17
_MAX_TEXT_CHARACTERS = 1024
_MAX_NUMBER = 1 << 20
# T5's character map (33) and its steps (2) together make 66.
_MAX_GROWTH = 256
# For the tokens that the library normalizes when it loads them, after normalizing
_MAX_NORMALIZED_CHARACTERS = 1 << 23
_MAX_ADDED_CHARACTERS = 1 << 22
# SentencePiece's maps have 240,000 bytes and at most 33 for one character.
_MAX_CHARACTER_MAP_BYTES = 1 << 22
_MAX_REPLACEMENT_BYTES = 64
_MAX_TEMPLATE_PIECES = 64
_MAX_TEMPLATE_IDS = 1024
# The longest tokens in use have 512 characters. The library keeps a Unigram vocabulary in a tree whose nodes take
# 350 bytes, and deletes it by recursion; finding the merges of a token takes quadratic time.
_MAX_TOKEN_CHARACTERS = 1024
_MAX_UNIGRAM_BYTES = 1 << 22
_MAX_WORD_CHARACTERS = 10_000


def parse_tokenizer_json(content: bytes) -> dict[str, Any]:
    """Return the contents of a tokenizer.json; raise ClearheadError if it is not valid or exceeds a limit."""
    if content.count(b",") > _MAX_COMMAS or content.count(b"[") + content.count(b"{") > _MAX_BRACKETS:
        raise ClearheadError(f"it has more than {_MAX_COMMAS} values or {_MAX_BRACKETS} lists")
    try:
        parsed = json.loads(content.decode(), object_pairs_hook=_without_repeated_keys)
    except (ValueError, RecursionError) as error:  # ValueError also for invalid UTF-8
        if isinstance(error, ClearheadError):
            raise
        raise ClearheadError(f"it is not valid JSON: {shorten(str(error), 200)}") from None
    if not isinstance(parsed, dict):
        raise ClearheadError(f"it contains a {type(parsed).__name__}; it must contain a JSON object")
    num_pattern_characters = 0
    for kind, plural in _STEPS.items():
        steps = [*_steps(parsed.get(kind), plural)]
        for step in steps:
            _check_values(step)
            num_pattern_characters += len(_pattern(step)[1])
        growth = _growth(steps)
        if len(steps) > _MAX_STEPS or growth > _MAX_GROWTH:
            raise ClearheadError(
                f"its {kind} has {len(steps)} steps that make a text up to {min(growth, 10**9)} times as long; at most "
                f"{_MAX_STEPS} steps and a factor of {_MAX_GROWTH} are allowed"
            )
        if kind == "normalizer":
            _check_added_tokens(parsed.get("added_tokens"), growth)
    if num_pattern_characters > _MAX_PATTERN_CHARACTERS:
        raise ClearheadError(
            f"its patterns have {num_pattern_characters} characters; at most {_MAX_PATTERN_CHARACTERS} are allowed"
        )
    _check_model(parsed.get("model"))
    return parsed


def check_vocabulary(tokens: Iterable[str], is_unigram: bool) -> None:
    """Raise ClearheadError if a token is too long, or if all tokens of a Unigram model together have too many bytes."""
    num_bytes = 0
    for token in tokens:
        if len(token) > _MAX_TOKEN_CHARACTERS:
            raise ClearheadError(
                f"the token {quote(token)} has {len(token)} characters; at most {_MAX_TOKEN_CHARACTERS} are allowed"
            )
        num_bytes += len(token.encode("utf-8", "surrogatepass")) if is_unigram else 0
    if num_bytes > _MAX_UNIGRAM_BYTES:
        raise ClearheadError(f"the vocabulary has {num_bytes} bytes; at most {_MAX_UNIGRAM_BYTES} are allowed")


def check_character_map(blob: bytes) -> int:
    """Return the length of the longest text that a character map writes for a character.

    Raise ClearheadError if the map or that text is too large. After its trie, each text ends in a zero byte.
    """
    if len(blob) > _MAX_CHARACTER_MAP_BYTES:
        raise ClearheadError(f"the character map has {len(blob)} bytes; at most {_MAX_CHARACTER_MAP_BYTES} are allowed")
    replacements = blob[4 + int.from_bytes(blob[:4], "little") :]
    longest = max(map(len, replacements.split(b"\0")))
    if longest > _MAX_REPLACEMENT_BYTES:
        raise ClearheadError(
            f"the character map replaces a character by {longest} bytes; at most {_MAX_REPLACEMENT_BYTES} are allowed"
        )
    return longest


def _without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; of a repeated key, the library might read another value than the one that is checked."""
    content = dict(pairs)
    if len(content) < len(pairs) and not all(isinstance(value, int) for _, value in pairs):
        raise ClearheadError("an object in it has the same key twice")
    return content


def _steps(value: Any, plural: str, depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a step or of a nested sequence of them."""
    if depth > _MAX_DEPTH:
        raise ClearheadError(f"its sequences are nested more than {_MAX_DEPTH} deep")
    if isinstance(value, Mapping):
        yield value
        nested = value.get(plural)
        for step in nested if isinstance(nested, list) else []:
            yield from _steps(step, plural, depth + 1)


def _check_values(step: Mapping[str, Any]) -> None:
    """Check the texts and numbers of a step, and the contents of those that have more."""
    for key, value in step.items():
        if isinstance(value, str) and len(value) > _MAX_TEXT_CHARACTERS and key != "precompiled_charsmap":
            raise ClearheadError(
                f"{shorten(key)} has {len(value)} characters; at most {_MAX_TEXT_CHARACTERS} are allowed"
            )
        if isinstance(value, (int, float)) and not 0 <= value <= _MAX_NUMBER:
            raise ClearheadError(f"{shorten(key)} is {quote(value)}; it must be from 0 to {_MAX_NUMBER}")
    if step.get("type") == "FixedLength" and not step.get("length"):
        raise ClearheadError("a pre-tokenizer splits a text into pieces of length 0")
    for name, num_texts in (("single", 1), ("pair", 2)):
        _check_template(step.get(name), step.get("special_tokens"), num_texts)


def _check_template(pieces: Any, special_tokens: Any, num_texts: int) -> None:
    """Check how a post-processor frames a text: each text once, and few special tokens."""
    if not isinstance(pieces, list):
        return
    texts = [str(piece["Sequence"]) for piece in pieces if isinstance(piece, dict) and "Sequence" in piece]
    ids = [
        token_id
        for token in (special_tokens.values() if isinstance(special_tokens, dict) else ())
        if isinstance(token, dict) and isinstance(token.get("ids"), list)
        for token_id in token["ids"]
    ]
    if len(texts) > num_texts or len(pieces) > _MAX_TEMPLATE_PIECES or len(ids) > _MAX_TEMPLATE_IDS:
        raise ClearheadError(
            f"its post-processor makes {num_texts} text(s) into {len(pieces)} pieces and {len(ids)} ids; each text may "
            f"occur once, among at most {_MAX_TEMPLATE_PIECES} pieces and {_MAX_TEMPLATE_IDS} ids"
        )


def _pattern(step: Mapping[str, Any]) -> tuple[str, str]:
    """Return the kind and the text of a step's pattern; both are empty if it has none."""
    match step.get("pattern"):
        case {"String": str(text)}:
            return "String", text
        case {"Regex": str(text)}:
            return "Regex", text
    return "", ""


def _growth(steps: Iterable[Mapping[str, Any]]) -> int:
    """Return the factor by which steps can lengthen a text; Unicode's own normal forms are not counted.

    A regular expression may match between any two characters, so its content is added to each.
    """
    growth = 1
    for step in steps:
        kind, pattern = _pattern(step)
        content = step.get("content")
        if kind and isinstance(content, str):
            is_text = kind == "String" and pattern
            growth *= max(1, ceil(len(content) / len(pattern))) if is_text else len(content) + 1
        if "precompiled_charsmap" in step:
            growth *= _character_map_growth(step["precompiled_charsmap"])
    return growth


def _character_map_growth(encoded: Any) -> int:
    """Return the number of bytes that a character map can write for one byte."""
    if not isinstance(encoded, str):
        return 1  # the library rejects it
    try:
        blob = base64.b64decode(encoded)
    except (ValueError, binascii.Error):
        return 1
    return max(1, check_character_map(blob))


def _check_added_tokens(added: Any, growth: int) -> None:
    tokens = [token for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    texts = [token["content"] for token in tokens if isinstance(token.get("content"), str)]
    check_vocabulary(texts, is_unigram=False)
    normalized = [token for token in tokens if token.get("normalized") is not False]
    num_characters = sum(map(len, texts))
    num_normalized = growth * sum(len(str(token.get("content"))) for token in normalized)
    if num_characters > _MAX_ADDED_CHARACTERS or num_normalized > _MAX_NORMALIZED_CHARACTERS:
        raise ClearheadError(
            f"its added tokens have {num_characters} characters and {num_normalized} when they are normalized; at most "
            f"{_MAX_ADDED_CHARACTERS} and {_MAX_NORMALIZED_CHARACTERS} are allowed"
        )


def _check_model(model: Any) -> None:
    if not isinstance(model, dict):
        return  # the library rejects it
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, list):  # Unigram: tokens with their scores
        pairs = [pair for pair in vocabulary if isinstance(pair, list) and pair and isinstance(pair[0], str)]
        check_vocabulary((pair[0] for pair in pairs), is_unigram=True)
    elif isinstance(vocabulary, dict):
        check_vocabulary(vocabulary, is_unigram=False)
    _check_values({key: value for key, value in model.items() if isinstance(value, str)})
    _check_merges(model.get("merges"), model.get("continuing_subword_prefix"))
    word_characters = model.get("max_input_chars_per_word")
    if isinstance(word_characters, int) and word_characters > _MAX_WORD_CHARACTERS:
        raise ClearheadError(
            f"max_input_chars_per_word is {quote(word_characters)}; at most {_MAX_WORD_CHARACTERS} are allowed"
        )


def _check_merges(merges: Any, prefix: Any) -> None:
    """Check that the second token of each merge begins with the prefix of tokens that continue a word.

    The library removes as many bytes as the prefix has without looking at them. If that cuts a character into two, it
    ends the process.
    """
    if not isinstance(merges, list) or not isinstance(prefix, str) or not prefix:
        return
    for merge in merges:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if isinstance(parts, list) and len(parts) > 1 and not str(parts[1]).startswith(prefix):
            raise ClearheadError(
                f"the second token of the merge {quote(merge)} does not begin with {quote(prefix)}, its "
                "continuing_subword_prefix; correct the merge, or remove the prefix"
            )
