"""Build the tokenizer that a GGUF file stores in its metadata.

    tokenizer = tokenizer_from_gguf(open_gguf("model.gguf").metadata)

Key names: ggml's docs/gguf.md; defaults of missing keys: llama.cpp, src/llama-vocab.cpp.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TypeVar

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from clearhead.errors import ClearheadError, quote, unknown_name
from clearhead.tokenization.byte_level import byte_level_bpe
from clearhead.tokenization.library_tokenizer import (
    LibraryTokenizer,
    SpecialTokens,
    convert_library_errors,
    mark_special,
    set_framing_tokens,
)
from clearhead.tokenization.pre_tokenization import gguf_pre_tokenization
from clearhead.tokenization.sentencepiece import (
    Piece,
    PieceType,
    SentencePieceVocabulary,
    build_sentencepiece_tokenizer,
)
from clearhead.tokenization.sentencepiece_normalizer import META_SPACE
from clearhead.tokenization.tokenizer_limits import check_vocabulary

T = TypeVar("T")

PREFIX = "tokenizer.ggml."
_STOP_KEYS = ("eot_token_id", "eom_token_id")


def tokenizer_from_gguf(metadata: Mapping[str, object]) -> LibraryTokenizer:
    """Return the tokenizer that a GGUF file's key-value metadata describes."""
    builders = {"gpt2": _byte_level, "llama": _sentencepiece, "bert": _wordpiece, "t5": _unigram}
    model = _value(metadata, "model", str)
    if model is None:
        raise ClearheadError(f"the GGUF file has no tokenizer: the key {PREFIX}model is missing")
    if model not in builders:
        raise unknown_name("GGUF tokenizer model", model, builders)
    return builders[model](metadata)


def _byte_level(metadata: Mapping[str, object]) -> LibraryTokenizer:
    tokens, types = _vocabulary(metadata)
    pre_tokenization = gguf_pre_tokenization(_value(metadata, "pre", str) or "default")
    special = _special(metadata, tokens)
    merges = [_merge(text) for text in _array(metadata, "merges", str) or []]
    with convert_library_errors("the GGUF file's merges do not fit its tokens"):
        library = byte_level_bpe(
            {token: token_id for token_id, token in enumerate(tokens)},
            merges,
            pre_tokenization.patterns,
            ignore_merges=pre_tokenization.ignore_merges,
            normalizer=normalizers.NFC() if pre_tokenization.normalizes_to_nfc else None,
        )
    _mark(library, tokens, types)
    set_framing_tokens(
        library,
        special.bos if _flag(metadata, "add_bos_token", pre_tokenization.adds_bos) else None,
        special.eos if _flag(metadata, "add_eos_token", False) else None,
    )
    # DeepSeek's letters such as ü are tokens of their own, spelled as text and not in the alphabet of bytes.
    literal = [token for token, type_ in zip(tokens, types, strict=True) if type_ == PieceType.USER_DEFINED]
    return LibraryTokenizer(library, special, _chat_template(metadata), literal_tokens=literal)


def _pieces(metadata: Mapping[str, object]) -> list[Piece]:
    """Return the tokens of a file with their scores and types."""
    tokens, types = _vocabulary(metadata)
    tokens = [token.replace(" ", META_SPACE) for token in tokens]  # some files contain spaces in user-defined tokens
    scores = _array(metadata, "scores", float)
    if scores is None or len(scores) != len(tokens):
        raise ClearheadError(f"the GGUF file must give one score for each of its {len(tokens)} tokens")
    return [Piece(*piece) for piece in zip(tokens, scores, types, strict=True)]


def _unigram(metadata: Mapping[str, object]) -> LibraryTokenizer:
    """Return the tokenizer of T5 and XLM-R: the segmentation of a text with the best sum of scores."""
    pieces = _pieces(metadata)
    character_map = _array(metadata, "precompiled_charsmap", int) or []
    if not all(-128 <= byte < 256 for byte in character_map):
        raise ClearheadError(f"{PREFIX}precompiled_charsmap must hold bytes")
    return build_sentencepiece_tokenizer(
        SentencePieceVocabulary(
            pieces=pieces,
            algorithm="unigram",
            add_dummy_prefix=_flag(metadata, "add_space_prefix", True),
            remove_extra_whitespaces=_flag(metadata, "remove_extra_whitespaces", True),
            character_map=bytes(byte % 256 for byte in character_map),
        ),
        _special(metadata, [piece.text for piece in pieces], defaults={"eos": 1, "unknown": 2, "pad": 0}),
        adds_bos=_flag(metadata, "add_bos_token", False),
        adds_eos=_flag(metadata, "add_eos_token", True),
        chat_template=_chat_template(metadata),
    )


def _sentencepiece(metadata: Mapping[str, object]) -> LibraryTokenizer:
    pieces = _pieces(metadata)
    special = _special(metadata, [piece.text for piece in pieces], defaults={"bos": 1, "eos": 2, "unknown": 0})
    return build_sentencepiece_tokenizer(
        SentencePieceVocabulary(
            pieces=pieces,
            algorithm="bpe",
            add_dummy_prefix=_flag(metadata, "add_space_prefix", True),
        ),
        special,
        adds_bos=_flag(metadata, "add_bos_token", True),
        adds_eos=_flag(metadata, "add_eos_token", False),
        chat_template=_chat_template(metadata),
    )


def _wordpiece(metadata: Mapping[str, object]) -> LibraryTokenizer:
    """Return BERT's tokenizer: a GGUF file marks the start of a word by ▁, the library its continuation by ##."""
    tokens, types = _vocabulary(metadata)
    special = _special(metadata, tokens, defaults={"bos": 101, "eos": 102, "pad": 0, "unknown": 100})
    separator = _token(metadata, "seperator_token_id", tokens) or special.eos  # the key is misspelled in GGUF
    spelled = [_wordpiece_spelling(token, piece_type) for token, piece_type in zip(tokens, types, strict=True)]
    with convert_library_errors("the GGUF file's WordPiece vocabulary is not usable"):
        library = tokenizers.Tokenizer(
            models.WordPiece(
                {token: token_id for token_id, token in enumerate(spelled)},
                unk_token=special.unknown or "[UNK]",
            )
        )
    library.normalizer = normalizers.BertNormalizer(lowercase=_flag(metadata, "normalizer.lowercase", True))
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    _mark(library, spelled, types)
    set_framing_tokens(library, special.bos, separator)
    return LibraryTokenizer(library, special, _chat_template(metadata))


def _wordpiece_spelling(token: str, piece_type: PieceType) -> str:
    if piece_type != PieceType.NORMAL:
        return token
    return token.removeprefix(META_SPACE) if token.startswith(META_SPACE) else f"##{token}"


def _vocabulary(metadata: Mapping[str, object]) -> tuple[list[str], list[PieceType]]:
    tokens = _array(metadata, "tokens", str)
    if not tokens:
        raise ClearheadError(f"the GGUF file has no vocabulary: the key {PREFIX}tokens is missing")
    check_vocabulary(tokens, is_unigram=False)
    for token, count in Counter(tokens).most_common(1):
        if count > 1:
            raise ClearheadError(f"the token {quote(token)} occurs {count} times in the GGUF file's vocabulary")
    numbers = _array(metadata, "token_type", int) or [PieceType.NORMAL] * len(tokens)
    if len(numbers) != len(tokens):
        raise ClearheadError(f"the GGUF file has {len(tokens)} tokens, but {len(numbers)} token types")
    try:
        return tokens, [PieceType(number) for number in numbers]
    except ValueError as error:
        raise ClearheadError(f"{PREFIX}token_type holds a number that is not a token type: {error}") from error


def _merge(text: str) -> tuple[str, str]:
    """Return the two halves of a merge, which the first space separates unless the text starts with it."""
    cut = text.find(" ", 1)
    if cut < 0:
        raise ClearheadError(f"the GGUF file's merge {quote(text)} is not two tokens separated by a space")
    return text[:cut], text[cut + 1 :]


def _mark(library: tokenizers.Tokenizer, tokens: list[str], types: list[PieceType]) -> None:
    """Make control tokens special; user-defined tokens are matched as a whole, but decoded as text."""
    typed = list(zip(tokens, types, strict=True))
    mark_special(library, [token for token, type_ in typed if type_ in (PieceType.CONTROL, PieceType.UNKNOWN)])
    library.add_tokens(
        [AddedToken(token, normalized=False) for token, type_ in typed if type_ == PieceType.USER_DEFINED]
    )


def _special(
    metadata: Mapping[str, object], tokens: list[str], defaults: Mapping[str, int] | None = None
) -> SpecialTokens:
    keys = {"bos": "bos", "eos": "eos", "pad": "padding", "unknown": "unknown"}
    roles = {role: _token(metadata, f"{key}_token_id", tokens) for role, key in keys.items()}
    for role, token_id in (defaults or {}).items():
        if roles[role] is None and token_id < len(tokens):
            roles[role] = tokens[token_id]
    stops = [token for key in _STOP_KEYS if (token := _token(metadata, key, tokens)) is not None]
    return SpecialTokens(**roles, stops=tuple(stops))


def _token(metadata: Mapping[str, object], key: str, tokens: list[str]) -> str | None:
    """Return the token whose id the key holds; None if the key is missing."""
    token_id = _value(metadata, key, int)
    if token_id is None:
        return None
    if not 0 <= token_id < len(tokens):
        raise ClearheadError(f"{PREFIX}{key} is {token_id}, but the GGUF file has {len(tokens)} tokens")
    return tokens[token_id]


def _flag(metadata: Mapping[str, object], key: str, default: bool) -> bool:
    value = _value(metadata, key, bool)
    return default if value is None else value


def _chat_template(metadata: Mapping[str, object]) -> str | None:
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ClearheadError(f"tokenizer.chat_template has type {type(template).__name__}; it must be a string")
    return template


def _value(metadata: Mapping[str, object], key: str, expected: type[T]) -> T | None:
    value = metadata.get(PREFIX + key)
    if value is not None and not isinstance(value, expected):
        raise ClearheadError(f"{PREFIX}{key} has type {type(value).__name__}; it must have type {expected.__name__}")
    return value


def _array(metadata: Mapping[str, object], key: str, expected: type[T]) -> list[T] | None:
    """Return an array as a list of Python values; readers give lists, NumPy arrays, bytes or sequences of their own."""
    values = metadata.get(PREFIX + key)
    if values is None:
        return None
    if not isinstance(values, Iterable) or isinstance(values, (str, Mapping)):
        raise ClearheadError(f"{PREFIX}{key} has type {type(values).__name__}; it must be an array")
    listed = values.tolist() if hasattr(values, "tolist") else list(values)
    if not all(isinstance(value, expected) for value in listed):
        raise ClearheadError(f"{PREFIX}{key} must hold only {expected.__name__} values")
    return listed
