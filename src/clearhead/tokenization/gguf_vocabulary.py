"""The tokenizer that a GGUF file carries in its metadata.

    tokenizer = from_gguf(open_gguf("model.gguf").metadata)

Key names: ggml's docs/gguf.md; defaults where a key is missing: llama.cpp, src/llama-vocab.cpp.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TypeVar

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from clearhead.errors import ClearheadError, unknown_name
from clearhead.tokenization.byte_level import byte_level_bpe
from clearhead.tokenization.fast import FastTokenizer, SpecialTokens, frame, library_errors, mark_special
from clearhead.tokenization.sentencepiece import Kind, Piece, SentencePieces, build
from clearhead.tokenization.sentencepiece_normalizer import SPACE
from clearhead.tokenization.splits import gguf_split

T = TypeVar("T")

PREFIX = "tokenizer.ggml."
STOP_KEYS = ("eot_token_id", "eom_token_id")


def from_gguf(metadata: Mapping[str, object]) -> FastTokenizer:
    """The tokenizer of a GGUF file's key-value metadata."""
    builders = {"gpt2": _byte_level, "llama": _sentencepiece, "bert": _wordpiece}
    model = _value(metadata, "model", str)
    if model is None:
        raise ClearheadError(f"the GGUF file has no tokenizer: the key {PREFIX}model is missing")
    if model not in builders:
        raise unknown_name("GGUF tokenizer model", model, builders)
    return builders[model](metadata)


def _byte_level(metadata: Mapping[str, object]) -> FastTokenizer:
    tokens, kinds = _vocabulary(metadata)
    split = gguf_split(_value(metadata, "pre", str) or "default")
    special = _special(metadata, tokens)
    merges = [_merge(text) for text in _array(metadata, "merges", str) or []]
    with library_errors("the GGUF file's merges do not fit its tokens"):
        library = byte_level_bpe(
            {token: token_id for token_id, token in enumerate(tokens)},
            merges,
            split.patterns,
            whole_words_first=split.whole_words_first,
            normalizer=normalizers.NFC() if split.composes_unicode else None,
        )
    _mark(library, tokens, kinds)
    frame(
        library,
        special.bos if _flag(metadata, "add_bos_token", split.adds_bos) else None,
        special.eos if _flag(metadata, "add_eos_token", False) else None,
    )
    return FastTokenizer(library, special, _chat_template(metadata))


def _sentencepiece(metadata: Mapping[str, object]) -> FastTokenizer:
    tokens, kinds = _vocabulary(metadata)
    tokens = [token.replace(" ", SPACE) for token in tokens]  # some files have spaces in user-defined tokens
    scores = _array(metadata, "scores", float)
    if scores is None or len(scores) != len(tokens):
        raise ClearheadError(f"the GGUF file must give one score for each of its {len(tokens)} tokens")
    special = _special(metadata, tokens, defaults={"bos": 1, "eos": 2, "unknown": 0})
    return build(
        SentencePieces(
            pieces=[Piece(*piece) for piece in zip(tokens, scores, kinds, strict=True)],
            algorithm="bpe",
            add_dummy_prefix=_flag(metadata, "add_space_prefix", True),
        ),
        special,
        adds_bos=_flag(metadata, "add_bos_token", True),
        adds_eos=_flag(metadata, "add_eos_token", False),
        chat_template=_chat_template(metadata),
    )


def _wordpiece(metadata: Mapping[str, object]) -> FastTokenizer:
    """BERT's: a GGUF file marks the start of a word by ▁, the library its continuation by ##."""
    tokens, kinds = _vocabulary(metadata)
    special = _special(metadata, tokens, defaults={"bos": 101, "eos": 102, "pad": 0, "unknown": 100})
    separator = _token(metadata, "seperator_token_id", tokens) or special.eos  # the key is spelled so
    spelled = [
        token if kind != Kind.NORMAL else token.removeprefix(SPACE) if token.startswith(SPACE) else f"##{token}"
        for token, kind in zip(tokens, kinds, strict=True)
    ]
    with library_errors("the GGUF file's WordPiece vocabulary is not usable"):
        library = tokenizers.Tokenizer(
            models.WordPiece(
                {token: token_id for token_id, token in enumerate(spelled)},
                unk_token=special.unknown or "[UNK]",
            )
        )
    library.normalizer = normalizers.BertNormalizer(lowercase=_flag(metadata, "normalizer.lowercase", True))
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    _mark(library, spelled, kinds)
    frame(library, special.bos, separator)
    return FastTokenizer(library, special, _chat_template(metadata))


def _vocabulary(metadata: Mapping[str, object]) -> tuple[list[str], list[Kind]]:
    tokens = _array(metadata, "tokens", str)
    if not tokens:
        raise ClearheadError(f"the GGUF file has no vocabulary: the key {PREFIX}tokens is missing")
    for token, count in Counter(tokens).most_common(1):
        if count > 1:
            raise ClearheadError(f"the token {token!r} occurs {count} times in the GGUF file's vocabulary")
    numbers = _array(metadata, "token_type", int) or [Kind.NORMAL] * len(tokens)
    if len(numbers) != len(tokens):
        raise ClearheadError(f"the GGUF file has {len(tokens)} tokens, but {len(numbers)} token types")
    try:
        return tokens, [Kind(number) for number in numbers]
    except ValueError as error:
        raise ClearheadError(f"the GGUF file's {PREFIX}token_type holds a number that is no type: {error}") from error


def _merge(text: str) -> tuple[str, str]:
    """The two halves of a merge: a space parts them, but not one at the very start."""
    cut = text.find(" ", 1)
    if cut < 0:
        raise ClearheadError(f"the GGUF file's merge {text!r} is not two tokens with a space between them")
    return text[:cut], text[cut + 1 :]


def _mark(library: tokenizers.Tokenizer, tokens: list[str], kinds: list[Kind]) -> None:
    """Control tokens are special; user-defined ones are found whole in a text, but are text."""
    by_kind = list(zip(tokens, kinds, strict=True))
    mark_special(library, [token for token, kind in by_kind if kind in (Kind.CONTROL, Kind.UNKNOWN)])
    library.add_tokens([AddedToken(token, normalized=False) for token, kind in by_kind if kind == Kind.USER_DEFINED])


def _special(
    metadata: Mapping[str, object], tokens: list[str], defaults: Mapping[str, int] | None = None
) -> SpecialTokens:
    keys = {"bos": "bos", "eos": "eos", "pad": "padding", "unknown": "unknown"}
    roles = {role: _token(metadata, f"{key}_token_id", tokens) for role, key in keys.items()}
    for role, token_id in (defaults or {}).items():
        if roles[role] is None and token_id < len(tokens):
            roles[role] = tokens[token_id]
    stops = [token for key in STOP_KEYS if (token := _token(metadata, key, tokens)) is not None]
    return SpecialTokens(**roles, stops=tuple(stops))


def _token(metadata: Mapping[str, object], key: str, tokens: list[str]) -> str | None:
    """The token whose id a key gives."""
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
        raise ClearheadError(f"tokenizer.chat_template is {type(template).__name__}, where text is needed")
    return template


def _value(metadata: Mapping[str, object], key: str, kind: type[T]) -> T | None:
    value = metadata.get(PREFIX + key)
    if value is not None and not isinstance(value, kind):
        raise ClearheadError(f"{PREFIX}{key} is {type(value).__name__}, where {kind.__name__} is needed")
    return value


def _array(metadata: Mapping[str, object], key: str, kind: type[T]) -> list[T] | None:
    """An array as a list of plain values; readers give lists, NumPy arrays or sequences of their own."""
    values = metadata.get(PREFIX + key)
    if values is None:
        return None
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes, Mapping)):
        raise ClearheadError(f"{PREFIX}{key} is {type(values).__name__}, where an array is needed")
    listed = values.tolist() if hasattr(values, "tolist") else list(values)
    if not all(isinstance(value, kind) for value in listed):
        raise ClearheadError(f"{PREFIX}{key} holds other things than {kind.__name__}")
    return listed
