"""Build tokenizers of the `tokenizers` library from SentencePiece vocabularies.

    vocabulary = SentencePieceVocabulary(pieces=[...], algorithm="bpe")
    tokenizer = build_sentencepiece_tokenizer(vocabulary, SpecialTokens(bos="<s>"), adds_bos=True)

Encoding equals the sentencepiece package's, except that control tokens such as `</s>` are recognized in a text, as
chat templates need; sentencepiece itself never does that.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from clearhead.errors import ClearheadError, quote
from clearhead.tokenization.byte_level import merges_by_rank
from clearhead.tokenization.character_map import CharacterMap
from clearhead.tokenization.library_tokenizer import (
    LibraryTokenizer,
    SpecialTokens,
    convert_library_errors,
    mark_special,
    set_framing_tokens,
)
from clearhead.tokenization.sentencepiece_normalizer import META_SPACE, SentencePieceNormalizer
from clearhead.tokenization.tokenizer_limits import check_vocabulary

# SentencePiece trains pieces of at most 16 characters by default; every split of each piece is tried for merges.
_MAX_PIECE_CHARACTERS = 512
# Lower than any sum of real scores for the text of a byte token, so that this text is never taken for the byte
_NEVER_CHOSEN = -1e4


class PieceType(IntEnum):
    """The type of a piece; SentencePiece's and GGUF's files use these numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Piece(NamedTuple):
    """An entry of a SentencePiece vocabulary."""

    text: str
    score: float
    type: PieceType


@dataclass(frozen=True, kw_only=True)
class SentencePieceVocabulary:
    """A vocabulary, and how text is normalized for it. The id of a piece is its index in `pieces`."""

    pieces: Sequence[Piece]
    algorithm: Literal["bpe", "unigram"]
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = False
    character_map: bytes = b""

    def __post_init__(self) -> None:
        counts = Counter(piece.text for piece in self.pieces)
        for text, count in counts.most_common(1):
            if count > 1:
                raise ClearheadError(f"the piece {quote(text)} occurs {count} times in the vocabulary")
        if "" in counts:
            raise ClearheadError(f"piece {[piece.text for piece in self.pieces].index('')} is empty")
        longest = max(map(len, counts), default=0)
        if longest > _MAX_PIECE_CHARACTERS:
            raise ClearheadError(f"a piece has {longest} characters; at most {_MAX_PIECE_CHARACTERS} are supported")

    def texts(self, piece_type: PieceType) -> list[str]:
        """Return the texts of all pieces of a type."""
        return [piece.text for piece in self.pieces if piece.type == piece_type]


def build_sentencepiece_tokenizer(
    vocabulary: SentencePieceVocabulary,
    special: SpecialTokens,
    *,
    adds_bos: bool,
    adds_eos: bool = False,
    added: Mapping[int, AddedToken] | None = None,
    chat_template: str | None = None,
) -> LibraryTokenizer:
    """Return the tokenizer of a vocabulary; `added` are further tokens by their ids, in order."""
    with convert_library_errors("the SentencePiece vocabulary is not usable"):
        library = tokenizers.Tokenizer(_bpe(vocabulary) if vocabulary.algorithm == "bpe" else _unigram(vocabulary))
        library.normalizer = _library_normalizer(vocabulary)
    if vocabulary.algorithm == "bpe" and (user_defined := vocabulary.texts(PieceType.USER_DEFINED)):
        library.pre_tokenizer = _isolate(user_defined)
    strips_space = vocabulary.add_dummy_prefix or vocabulary.remove_extra_whitespaces
    library.decoder = decoders.Sequence(
        [
            decoders.Replace(META_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", left=1)] if strips_space else []),
        ]
    )
    mark_special(library, vocabulary.texts(PieceType.CONTROL) + vocabulary.texts(PieceType.UNKNOWN))
    for token_id, token in (added or {}).items():
        library.add_tokens([token])
        if library.token_to_id(token.content) != token_id:
            raise ClearheadError(
                f"the added token {quote(token.content)} has the id {token_id}, which does not follow the vocabulary"
            )
    set_framing_tokens(library, special.bos if adds_bos else None, special.eos if adds_eos else None)
    return LibraryTokenizer(library, special, chat_template, _exact_normalizer(vocabulary))


def _isolate(texts: list[str]) -> pre_tokenizers.PreTokenizer:
    """Split a text so that each of `texts` becomes a word, which `ignore_merges` then takes as a whole.

    The literal text of a byte token is split after its first character, so that it is not taken as a whole.
    """
    longest_first = sorted(texts, key=len, reverse=True)
    patterns = ("|".join(map(re.escape, longest_first)), r"\A<(?=0x[0-9A-F]{2}>\z)")
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns])


def _bpe(vocabulary: SentencePieceVocabulary) -> models.BPE:
    """Return BPE that merges the neighbors with the best-scoring piece; `_isolate` handles user-defined pieces."""
    normal = [(-piece.score, index) for index, piece in enumerate(vocabulary.pieces) if piece.type == PieceType.NORMAL]
    unknown = vocabulary.texts(PieceType.UNKNOWN)
    return models.BPE(
        {piece.text: index for index, piece in enumerate(vocabulary.pieces)},
        merges_by_rank([vocabulary.pieces[index].text for _, index in sorted(normal)]),
        unk_token=unknown[0] if unknown else None,
        fuse_unk=True,
        byte_fallback=bool(vocabulary.texts(PieceType.BYTE)),
        ignore_merges=bool(vocabulary.texts(PieceType.USER_DEFINED)),
    )


def _unigram(vocabulary: SentencePieceVocabulary) -> models.Unigram:
    """Return the model that segments a text with the best sum of scores.

    The sums are in double precision here and in single precision in sentencepiece: of segmentations with equal sums,
    such as `ii i` and `i ii`, the two may choose different ones.
    """
    unknown = [index for index, piece in enumerate(vocabulary.pieces) if piece.type == PieceType.UNKNOWN]
    if not unknown:
        raise ClearheadError("the Unigram vocabulary has no piece for unknown text")
    check_vocabulary((piece.text for piece in vocabulary.pieces), is_unigram=True)
    return models.Unigram(
        [(piece.text, _unigram_score(piece)) for piece in vocabulary.pieces],
        unk_id=unknown[0],
        byte_fallback=bool(vocabulary.texts(PieceType.BYTE)),
    )


def _unigram_score(piece: Piece) -> float:
    match piece.type:
        case PieceType.USER_DEFINED:  # measured with sentencepiece 0.2.2, from the scores of its best segmentations
            return 0.1 * (len(piece.text.encode()) - 1)
        case PieceType.BYTE | PieceType.UNUSED:
            return _NEVER_CHOSEN
        case _:
            return piece.score


def _exact_normalizer(vocabulary: SentencePieceVocabulary) -> SentencePieceNormalizer | None:
    if not vocabulary.character_map:
        return None
    return SentencePieceNormalizer(
        character_map=CharacterMap(vocabulary.character_map),
        add_dummy_prefix=vocabulary.add_dummy_prefix,
        remove_extra_whitespaces=vocabulary.remove_extra_whitespaces,
        user_defined=tuple(vocabulary.texts(PieceType.USER_DEFINED)),
    )


def _library_normalizer(vocabulary: SentencePieceVocabulary) -> normalizers.Normalizer:
    """Return the steps that tokenizer.json can express; `Precompiled` comes closest to a character map."""
    steps: list[normalizers.Normalizer] = []
    if vocabulary.character_map:
        steps.append(normalizers.Precompiled(vocabulary.character_map))
    if vocabulary.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    steps.append(normalizers.Replace(" ", META_SPACE))
    if vocabulary.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(rf"{META_SPACE}+\z"), ""))
    if vocabulary.add_dummy_prefix:
        steps.append(normalizers.Prepend(META_SPACE))
    return normalizers.Sequence(steps)
