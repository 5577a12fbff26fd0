"""Describe a tokenizer by the metadata of a GGUF file, the inverse of gguf_vocabulary.py.

    metadata = tokenizer_to_gguf(tokenizer, vocab_size=49152); metadata["tokenizer.ggml.model"]

Values are Python texts, numbers, flags and lists. Whether the metadata means the same tokenizer is checked: it is read
back, and both tokenizers encode a list of texts.
"""

import base64
import json
from collections.abc import Iterator
from typing import Any

from clearhead.errors import ClearheadError
from clearhead.tokenization.gguf_vocabulary import PREFIX, tokenizer_from_gguf
from clearhead.tokenization.library_tokenizer import LibraryTokenizer
from clearhead.tokenization.pre_tokenization import GGUF_PRE_TOKENIZATIONS, GPT2
from clearhead.tokenization.sentencepiece import PieceType
from clearhead.tokenization.sentencepiece_normalizer import META_SPACE

_UNUSED_SCORE = -10000.0  # of ids without a token, as llama.cpp's converter writes them
# Texts that tell tokenizers apart: cases, contractions, digits, spaces, lines, scripts, symbols, emoji, combining marks
_PROBES = (
    "Hello, world! It's 3:45 p.m., we'll pay $1,234.56 for 100% of it.",
    "  two  spaces and\ta tab \n\n  three lines\r\n\r\nend   ",
    "Zürich, naïve café, Ελλάδα, Москва, 東京都 2024年, 한국어, עברית, हिन्दी, ไทย",
    "def f(x):\n    return x**2 + 10 # comment\n\n\n}{;>>= != ~^`'\"",
    "🙂👩‍👩‍👧 e\u0301 ﬁ ½ ① \u00a0 ™ İI'M DON'T camelCase HTTPServer2Go",
    "1 12 123 1234 12345 ²³ x1y22z333",
    "a",
    " a",
    "\n",
    "",
)


def tokenizer_to_gguf(tokenizer: object, vocab_size: int) -> dict[str, Any]:
    """Return the metadata of a tokenizer for a model with `vocab_size` rows in its token table.

    Raise ClearheadError if GGUF cannot express the tokenizer.
    """
    if not isinstance(tokenizer, LibraryTokenizer):
        raise ClearheadError(f"a {type(tokenizer).__name__} cannot be written to a GGUF file; use --to native instead")
    described = json.loads(tokenizer.portable_json())
    model = described["model"]
    if model.get("type") not in ("BPE", "WordPiece", "Unigram"):
        raise ClearheadError(
            f"a tokenizer of type {model.get('type')} cannot be written to a GGUF file; only BPE, WordPiece and "
            "Unigram can be"
        )
    if tokenizer.vocab_size > vocab_size:
        raise ClearheadError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but the model only {vocab_size} embeddings"
        )
    is_byte_level = (described.get("decoder") or {}).get("type") == "ByteLevel"
    is_wordpiece = model["type"] == "WordPiece"
    tokens, types = _vocabulary(
        tokenizer, described, vocab_size, is_sentencepiece=not is_byte_level and not is_wordpiece
    )
    if is_wordpiece:
        tokens = [_phantom_space(*token) for token in zip(tokens, types, strict=True)]
    metadata = {PREFIX + "tokens": tokens, PREFIX + "token_type": types}
    if is_wordpiece:
        metadata |= _wordpiece_keys(tokenizer, described)
    elif model["type"] == "Unigram":
        metadata |= _unigram_keys(described, vocab_size)
    else:
        metadata |= _byte_level_keys(described) if is_byte_level else _sentencepiece_keys(described, tokens)
    metadata |= {PREFIX + key: value for key, value in _special_keys(tokenizer)}
    if tokenizer.chat_template is not None:
        metadata["tokenizer.chat_template"] = tokenizer.chat_template
    _check_same_tokens(tokenizer, metadata)
    return metadata


def _vocabulary(
    tokenizer: LibraryTokenizer, described: dict[str, Any], vocab_size: int, *, is_sentencepiece: bool
) -> tuple[list[str], list[int]]:
    """Return the tokens and their types; ids without a token get names that no text contains."""
    tokens = [f"[UNUSED{token_id}]" for token_id in range(vocab_size)]
    types = [PieceType.UNUSED] * vocab_size
    model, unknown_id = described["model"], tokenizer.unknown_id
    vocab, has_bytes = model["vocab"], is_sentencepiece
    if model["type"] == "Unigram":  # a list of tokens with their scores
        vocab, has_bytes = {token: index for index, (token, _) in enumerate(vocab)}, model.get("byte_fallback", False)
        unknown_id = model["unk_id"]
    for token, token_id in vocab.items():
        is_byte = has_bytes and len(token) == 6 and token.startswith("<0x") and token.endswith(">")
        tokens[token_id], types[token_id] = token, PieceType.BYTE if is_byte else PieceType.NORMAL
    for added in described.get("added_tokens", []):
        kind = PieceType.CONTROL if added["special"] else PieceType.USER_DEFINED
        tokens[added["id"]], types[added["id"]] = added["content"], kind
    if unknown_id is not None and is_sentencepiece:
        types[unknown_id] = PieceType.UNKNOWN
    return tokens, [int(piece_type) for piece_type in types]


def _phantom_space(token: str, piece_type: int) -> str:
    """Return a token of WordPiece as GGUF files spell it: marked at the start of a word, not within."""
    if piece_type != PieceType.NORMAL:
        return token
    return token.removeprefix("##") if token.startswith("##") else META_SPACE + token


def _wordpiece_keys(tokenizer: LibraryTokenizer, described: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of WordPiece; the tokens around a text are those that the tokenizer puts there."""
    first, *_, last = tokenizer.encode("a")
    normalizer = described.get("normalizer") or {}
    return {
        PREFIX + "model": "bert",
        PREFIX + "pre": "default",
        PREFIX + "bos_token_id": first,
        PREFIX + "cls_token_id": first,
        PREFIX + "eos_token_id": last,
        PREFIX + "seperator_token_id": last,  # the key is misspelled in GGUF
        PREFIX + "normalizer.lowercase": bool(normalizer.get("lowercase", True)),
    }


def _byte_level_keys(described: dict[str, Any]) -> dict[str, Any]:
    model = described["model"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return {PREFIX + "model": "gpt2", PREFIX + "pre": _pre_tokenizer_name(described), PREFIX + "merges": merges}


def _pre_tokenizer_name(described: dict[str, Any]) -> str:
    """Return the name that llama.cpp has for the way a text is split before it is merged."""
    patterns = tuple(_patterns(described.get("pre_tokenizer") or {}))
    normalizer = (described.get("normalizer") or {}).get("type")
    ignores_merges = bool(described["model"].get("ignore_merges"))
    if not described["model"]["merges"] and not ignores_merges and normalizer is None:
        return "gpt-2"  # every byte is a token, however the text is split
    same = [
        (name, entry)
        for name, entry in GGUF_PRE_TOKENIZATIONS.items()
        if entry.patterns == patterns and entry.normalizes_to_nfc == (normalizer == "NFC")
    ]
    same.sort(key=lambda item: item[1].ignore_merges != ignores_merges)
    if not same or normalizer not in (None, "NFC"):
        raise ClearheadError(
            "the tokenizer splits texts in a way that llama.cpp has no name for; use --to huggingface instead"
        )
    return same[0][0]


def _patterns(pre_tokenizer: dict[str, Any]) -> Iterator[str]:
    """Yield the patterns by which a text is split, one after the other."""
    match pre_tokenizer.get("type"):
        case "Sequence":
            for each in pre_tokenizer["pretokenizers"]:
                yield from _patterns(each)
        case "Split" if pre_tokenizer["behavior"] == "Isolated" and not pre_tokenizer["invert"]:
            yield pre_tokenizer["pattern"].get("Regex", "")
        case "Digits" if pre_tokenizer["individual_digits"]:
            yield r"\p{N}"
        case "ByteLevel":
            if pre_tokenizer["use_regex"]:
                yield GPT2
        case other:
            yield f"no known pattern: {other}"


def _sentencepiece_keys(described: dict[str, Any], tokens: list[str]) -> dict[str, Any]:
    """Return the keys of a SentencePiece vocabulary, whose scores are the order of its merges."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(described["model"]["merges"]):
        left, _, right = merge.partition(" ") if isinstance(merge, str) else (merge[0], "", merge[1])
        ranks.setdefault(left + right, rank)
    scores = [float(-ranks.get(token, len(ranks) + token_id)) for token_id, token in enumerate(tokens)]
    steps = described.get("normalizer") or {}
    has_prefix = "Prepend" in json.dumps(steps) or "Metaspace" in json.dumps(described.get("pre_tokenizer"))
    return {PREFIX + "model": "llama", PREFIX + "scores": scores, PREFIX + "add_space_prefix": has_prefix}


def _unigram_keys(described: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """Return the keys of a Unigram vocabulary: scores, and how a text is normalized before it is segmented."""
    scores = [float(score) for _, score in described["model"]["vocab"]]
    steps, pre_tokenizer = json.dumps(described.get("normalizer")), json.dumps(described.get("pre_tokenizer"))
    keys = {
        "model": "t5",
        "pre": "default",
        "scores": scores + [_UNUSED_SCORE] * (vocab_size - len(scores)),
        "add_space_prefix": "Prepend" in steps or "Metaspace" in pre_tokenizer,
        "remove_extra_whitespaces": "{2,}" in steps or "WhitespaceSplit" in pre_tokenizer,
    }
    character_map = _character_map(described.get("normalizer") or {})
    if character_map:
        keys["precompiled_charsmap"] = character_map
    return {PREFIX + key: value for key, value in keys.items()}


def _character_map(normalizer: dict[str, Any]) -> bytes:
    """Return the table by which SentencePiece replaces characters; b"" if there is none."""
    if normalizer.get("type") == "Precompiled":
        return base64.b64decode(normalizer["precompiled_charsmap"] or "")
    return b"".join(_character_map(each) for each in normalizer.get("normalizers", ()))


def _special_keys(tokenizer: LibraryTokenizer) -> Iterator[tuple[str, Any]]:
    """Yield the ids of special tokens, and whether a text begins and ends with them."""
    ids = {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "padding_token_id": tokenizer.pad_id,
        "unknown_token_id": tokenizer.unknown_id,
    }
    stops = sorted(tokenizer.stop_ids - {tokenizer.eos_id})
    for key, token_id in (*ids.items(), *zip(("eot_token_id", "eom_token_id"), stops, strict=False)):
        if token_id is not None:
            yield key, token_id
    framed = tokenizer.encode("a")
    yield "add_bos_token", tokenizer.bos_id is not None and framed[:1] == [tokenizer.bos_id]
    yield "add_eos_token", tokenizer.eos_id is not None and framed[-1:] == [tokenizer.eos_id]


def _check_same_tokens(tokenizer: LibraryTokenizer, metadata: dict[str, Any]) -> None:
    """Raise ClearheadError if the tokenizer that a reader makes of the metadata encodes a text differently."""
    read_back = tokenizer_from_gguf(metadata)
    special = "".join(tokenizer.token_text(token_id) for token_id in sorted(tokenizer.special_ids)[:20])
    for text in (*_PROBES, special):
        if read_back.encode(text) != tokenizer.encode(text):
            raise ClearheadError(
                f"a GGUF file cannot express this tokenizer: it would encode {text[:40]!r} differently; "
                "use --to huggingface instead"
            )
