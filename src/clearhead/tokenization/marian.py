"""Marian's tokenizer: SentencePiece segments the text, and a separate vocabulary assigns ids to the pieces.

    load_marian_tokenizer(Path("opus-mt-zh-en")).encode("你好，世界！")   # the last id is that of </s>

The vocabulary was counted on segmented text of both languages, so its ids are not SentencePiece's, and it may contain
a character that SentencePiece does not know. Files: source.spm, target.spm and vocab.json in Hugging Face folders;
sentencepiece.model or source.spm beside shared_vocabulary.json in CTranslate2's.
"""

import json
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path

from tokenizers import models

from clearhead.errors import ClearheadError, quote
from clearhead.files import MAX_JSON_TABLE_BYTES, read_bytes, read_json, read_json_object, write_bytes, write_text
from clearhead.tokenization.character_map import CharacterMap
from clearhead.tokenization.interface import StreamDecoder, Tokenizer
from clearhead.tokenization.library_tokenizer import SpecialTokens, convert_library_errors
from clearhead.tokenization.sentencepiece import PieceType
from clearhead.tokenization.sentencepiece_file import read_sentencepiece_model
from clearhead.tokenization.sentencepiece_normalizer import META_SPACE, SentencePieceNormalizer
from clearhead.tokenization.settings import TokenizerSettings
from clearhead.tokenization.tokenizer_limits import check_vocabulary

_SOURCE_MODEL, _TARGET_MODEL, _VOCABULARY = "source.spm", "target.spm", "vocab.json"
_CTRANSLATE2_MODEL, CTRANSLATE2_VOCABULARY = "sentencepiece.model", "shared_vocabulary.json"
DEFAULTS = SpecialTokens(eos="</s>", unknown="<unk>", pad="<pad>")
_LANGUAGE_CODE = re.compile(r">>.*?<<", re.DOTALL)  # the target language, before a text for a multilingual model
_NO_RULES = struct.pack("<II", 4, 0)  # a character map whose trie consists of its root only


class MarianTokenizer:
    """The tokenizer of a Marian model.

    `tokens` are in the order of their ids; `source_model` and `target_model` are the contents of SentencePiece files.
    Decoding only needs the vocabulary; the target's file encodes what a decoder reads. A decoded text may start or end
    with a space, which transformers strips; a stream cannot withdraw a space once it is written.
    """

    bos_id = None
    chat_template = None

    def __init__(
        self, source_model: bytes, tokens: Sequence[str], special: SpecialTokens = DEFAULTS, target_model: bytes = b""
    ) -> None:
        self._segmenter = _Segmenter(source_model)
        self._source_model = source_model
        self._target_model = target_model or source_model
        self._has_target_model = bool(target_model)
        self._tokens = tuple(tokens)
        self._ids = {token: token_id for token_id, token in enumerate(tokens)}
        if len(self._ids) < len(self._tokens):
            repeated = next(token for token_id, token in enumerate(tokens) if self._ids[token] != token_id)
            raise ClearheadError(f"the token {quote(repeated)} occurs more than once in the vocabulary")
        self._special = {"eos": special.eos, "unk": special.unknown, "pad": special.pad}
        self.eos_id, self.unknown_id, self.pad_id = (self._special_id(*role) for role in self._special.items())
        self.vocab_size = len(self._tokens)
        self.stop_ids = frozenset((self.eos_id,))
        self.special_ids = frozenset((self.eos_id, self.unknown_id, self.pad_id))
        longest_first = sorted((self._tokens[token_id] for token_id in self.special_ids), key=len, reverse=True)
        self._special_pattern = re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text` in the source language, by default followed by eos."""
        return self._encode(text, self._segmenter, add_special_tokens)

    def encode_target(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text` in the target language, by default followed by eos.

        Without a SentencePiece model of the target, as in CTranslate2's folders, the fewest tokens of the vocabulary
        that spell the text are taken.
        """
        return self._encode(text, self._target_segmenter, add_special_tokens)

    def _encode(self, text: str, segmenter: "_Segmenter", add_special_tokens: bool) -> list[int]:
        with convert_library_errors(f"the text {text[:40]!r} cannot be encoded"):
            ids = [self._ids.get(piece, self.unknown_id) for piece in self._pieces(text, segmenter)]
        return [*ids, self.eos_id] if add_special_tokens else ids

    @cached_property
    def _target_segmenter(self) -> "_Segmenter":
        if self._has_target_model:
            return _Segmenter(self._target_model)
        special = self.special_ids
        return self._segmenter.with_vocabulary(
            [f" {token}" if token_id in special else token for token_id, token in enumerate(self._tokens)],
            self.unknown_id,
        )

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`."""
        decoder = StreamDecoder(self, skip_special_tokens)
        return "".join([decoder.push(token_id) for token_id in ids]) + decoder.finish()

    def token_bytes(self, token_id: int, previous_id: int | None) -> bytes:
        """Return the UTF-8 bytes that a token adds to a text; a space follows a special token that is not skipped."""
        text = self.token_text(token_id)
        if previous_id is None:
            text = text.lstrip(" ")
        elif previous_id in self.special_ids:
            text = " " + text.lstrip(" ")
        return text.encode()

    def token_text(self, token_id: int) -> str:
        """Return one token with its spaces as spaces."""
        if not 0 <= token_id < self.vocab_size:
            return f"<{token_id}>"
        return self._tokens[token_id].replace(META_SPACE, " ")

    def save(self, folder: str | Path) -> None:
        """Write source.spm, target.spm, vocab.json and tokenizer_config.json for transformers' MarianTokenizer.

        Without a file for the target, as in CTranslate2's folders, the source's is written twice.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = {"tokenizer_class": "MarianTokenizer"} | {
            f"{key}_token": token for key, token in self._special.items()
        }
        write_bytes(folder / _SOURCE_MODEL, self._source_model)
        write_bytes(folder / _TARGET_MODEL, self._target_model)
        write_text(folder / _VOCABULARY, json.dumps(self._ids, ensure_ascii=False, indent=2))
        write_text(folder / "tokenizer_config.json", json.dumps(config, indent=2))
        for name in ("tokenizer.json", "special_tokens_map.json"):
            (folder / name).unlink(missing_ok=True)  # from another tokenizer in the same folder

    def _special_id(self, role: str, token: str | None) -> int:
        if not token or token not in self._ids:
            raise ClearheadError(f"the vocabulary lacks {quote(token)}, which Marian needs as {role}_token")
        return self._ids[token]

    def _pieces(self, text: str, segmenter: "_Segmenter") -> Iterator[str]:
        for index, part in enumerate(self._special_pattern.split(text)):
            if index % 2:
                yield part  # a special token
                continue
            if code := _LANGUAGE_CODE.match(part):
                yield code.group()
                part = part[code.end() :]
            yield from segmenter.pieces(part)


class _Segmenter:
    """Segments text with SentencePiece; text without a piece of its own is kept as it is."""

    def __init__(self, content: bytes) -> None:
        model, _ = read_sentencepiece_model(content)
        unsupported = {piece.type for piece in model.pieces} & {PieceType.USER_DEFINED, PieceType.BYTE}
        if model.algorithm != "unigram" or unsupported:
            pieces = "".join(f" with {piece_type.name.lower()} pieces" for piece_type in sorted(unsupported))
            raise ClearheadError(f"the SentencePiece model is {model.algorithm}{pieces}; Marian needs plain unigram")
        unknown = [index for index, piece in enumerate(model.pieces) if piece.type == PieceType.UNKNOWN]
        if not unknown:
            raise ClearheadError("the SentencePiece model has no piece for unknown text")
        # Only normal pieces may match. A piece that starts with a space never does, since spaces in the text are ▁.
        scored = [
            (piece.text if piece.type == PieceType.NORMAL else f" {piece.text}", piece.score) for piece in model.pieces
        ]
        check_vocabulary((text for text, _ in scored), is_unigram=True)
        self._model = models.Unigram(scored, unk_id=unknown[0])
        self._normalizer = SentencePieceNormalizer(
            character_map=CharacterMap(model.character_map or _NO_RULES),
            add_dummy_prefix=model.add_dummy_prefix,
            remove_extra_whitespaces=model.remove_extra_whitespaces,
            user_defined=(),
        )

    def with_vocabulary(self, tokens: Sequence[str], unknown_id: int) -> "_Segmenter":
        """Return a segmenter with the same normalization that spells a text with the fewest of these tokens."""
        segmenter = copy(self)
        segmenter._model = models.Unigram([(token, -1.0) for token in tokens], unk_id=unknown_id)
        return segmenter

    def pieces(self, text: str) -> list[str]:
        """Return the pieces of a text."""
        return [token.value for token in self._model.tokenize(self._normalizer.apply(text))]


def encode_target(text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a text that a decoder reads; Marian's tokenizer segments the two languages differently."""
    return tokenizer.encode_target(text) if isinstance(tokenizer, MarianTokenizer) else tokenizer.encode(text)


def find_marian_files(folder: Path) -> tuple[Path, Path] | None:
    """Return the paths of a folder's SentencePiece model and vocabulary; None if it lacks one of them."""
    pairs = (
        (_SOURCE_MODEL, _VOCABULARY),
        (_SOURCE_MODEL, CTRANSLATE2_VOCABULARY),
        (_CTRANSLATE2_MODEL, CTRANSLATE2_VOCABULARY),
    )
    for model, vocabulary in pairs:
        if (folder / model).is_file() and (folder / vocabulary).is_file():
            return folder / model, folder / vocabulary
    return None


def load_marian_tokenizer(folder: str | Path) -> MarianTokenizer:
    """Return the tokenizer in a Hugging Face or CTranslate2 folder."""
    folder = Path(folder)
    files = find_marian_files(folder)
    if files is None:
        raise ClearheadError(
            f"{folder} contains no Marian tokenizer; it must contain {_SOURCE_MODEL} and {_VOCABULARY}"
        )
    model, vocabulary = files
    target = folder / _TARGET_MODEL
    try:
        tokens = read_marian_vocabulary(vocabulary)
        settings = TokenizerSettings.read(folder)
        if vocabulary.name == CTRANSLATE2_VOCABULARY:
            tokens = [*tokens, str(DEFAULTS.pad)]
            settings = _ctranslate2_settings(folder / "config.json")
        if settings.tokenizer_config.get("separate_vocabs"):
            raise ClearheadError(
                "source and target have separate vocabularies; only Marian models with a shared one are supported"
            )
        special = settings.special_tokens(dict(enumerate(tokens)).get, DEFAULTS)
        return MarianTokenizer(read_bytes(model), tokens, special, read_bytes(target) if target.is_file() else b"")
    except ClearheadError as error:
        raise ClearheadError(f"the tokenizer in {folder} cannot be loaded: {error}") from error


def _ctranslate2_settings(path: Path) -> TokenizerSettings:
    """Read the special tokens from CTranslate2's config.json, whose keys are those of tokenizer_config.json."""
    return TokenizerSettings(
        tokenizer_config=read_json_object(path), special_tokens_map={}, generation_config={}, template_file=None
    )


def read_marian_vocabulary(path: Path) -> list[str]:
    """Return the tokens in the order of their ids.

    vocab.json maps each token to its id; shared_vocabulary.json lists the tokens in order.
    """
    content = read_json(path, MAX_JSON_TABLE_BYTES)
    tokens = content
    if isinstance(content, dict):
        tokens = sorted(content, key=lambda token: _checked_id(token, content[token], path))
        if any(content[token] != index for index, token in enumerate(tokens)):
            raise ClearheadError(
                f"{path.name} must give its {len(tokens)} tokens the ids from 0 to {len(tokens) - 1}, each once"
            )
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise ClearheadError(f"{path.name} is neither a list of tokens nor an object of tokens and their ids")
    try:
        "".join(tokens).encode()
    except UnicodeEncodeError as error:
        raise ClearheadError(f"{path.name} has a token with an incomplete character: {error.reason}") from error
    return tokens


def _checked_id(token: str, token_id: object, path: Path) -> int:
    if not isinstance(token_id, int) or isinstance(token_id, bool):
        raise ClearheadError(
            f"{path.name} gives the token {quote(token)} the id {quote(token_id)}; it must be a whole number"
        )
    return token_id
