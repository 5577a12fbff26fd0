"""SentencePiece vocabularies, from whatever file, as tokenizers of the `tokenizers` library.

    tokenizer = build(SentencePieces(pieces=[...], algorithm="bpe"), SpecialTokens(bos="<s>"), adds_bos=True)

Encoding equals the sentencepiece package's, except that control tokens such as `</s>` are found in a
text, as chat templates need; sentencepiece itself never does that.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from clearhead.errors import ClearheadError
from clearhead.tokenization.byte_level import merges_by_rank
from clearhead.tokenization.charsmap import Charsmap
from clearhead.tokenization.fast import FastTokenizer, SpecialTokens, frame, library_errors, mark_special
from clearhead.tokenization.sentencepiece_normalizer import SPACE, SentencePieceNormalizer

# SentencePiece trains pieces of at most 16 characters by default; merging tries every cut of each.
MAX_PIECE_CHARACTERS = 512
# Below any sum of true scores for the text of a byte token, so that only the byte itself becomes one.
NEVER = -1e4


class Kind(IntEnum):
    """Of a piece; the numbers are those of SentencePiece's and GGUF's files."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Piece(NamedTuple):
    text: str
    score: float
    kind: Kind


@dataclass(frozen=True, kw_only=True)
class SentencePieces:
    """A vocabulary and how text is prepared for it. The id of a piece is its place in `pieces`."""

    pieces: Sequence[Piece]
    algorithm: Literal["bpe", "unigram"]
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = False
    charsmap: bytes = b""

    def __post_init__(self) -> None:
        counts = Counter(piece.text for piece in self.pieces)
        for text, count in counts.most_common(1):
            if count > 1:
                raise ClearheadError(f"the piece {text!r} occurs {count} times in the vocabulary")
        if "" in counts:
            raise ClearheadError(f"piece {[piece.text for piece in self.pieces].index('')} is empty")
        longest = max(map(len, counts), default=0)
        if longest > MAX_PIECE_CHARACTERS:
            raise ClearheadError(f"a piece has {longest} characters; at most {MAX_PIECE_CHARACTERS} can be read")

    def texts(self, kind: Kind) -> list[str]:
        return [piece.text for piece in self.pieces if piece.kind == kind]


def build(
    vocabulary: SentencePieces,
    special: SpecialTokens,
    *,
    adds_bos: bool,
    adds_eos: bool = False,
    added: Mapping[int, AddedToken] | None = None,
    chat_template: str | None = None,
) -> FastTokenizer:
    """The tokenizer of a vocabulary; `added` are further tokens by id, in order."""
    with library_errors("the SentencePiece vocabulary is not usable"):
        library = tokenizers.Tokenizer(_bpe(vocabulary) if vocabulary.algorithm == "bpe" else _unigram(vocabulary))
        library.normalizer = _library_normalizer(vocabulary)
    if vocabulary.algorithm == "bpe" and (user_defined := vocabulary.texts(Kind.USER_DEFINED)):
        library.pre_tokenizer = _cut_out(user_defined)
    strips_space = vocabulary.add_dummy_prefix or vocabulary.remove_extra_whitespaces
    library.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", left=1)] if strips_space else []),
        ]
    )
    mark_special(library, vocabulary.texts(Kind.CONTROL) + vocabulary.texts(Kind.UNKNOWN))
    for token_id, token in (added or {}).items():
        library.add_tokens([token])
        if library.token_to_id(token.content) != token_id:
            raise ClearheadError(f"the added token {token.content!r} cannot have the id {token_id}")
    frame(library, special.bos if adds_bos else None, special.eos if adds_eos else None)
    return FastTokenizer(library, special, chat_template, _exact_normalizer(vocabulary))


def _cut_out(texts: list[str]) -> pre_tokenizers.PreTokenizer:
    """Cut the text so that these become words of their own, which `ignore_merges` then takes whole.

    So that the literal text of a byte token is not taken whole too, it is cut after its first character.
    """
    longest_first = sorted(texts, key=len, reverse=True)
    patterns = ("|".join(map(re.escape, longest_first)), r"\A<(?=0x[0-9A-F]{2}>\z)")
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns])


def _bpe(vocabulary: SentencePieces) -> models.BPE:
    """Neighbours merge whose joint piece has the best score; user-defined pieces are cut out before."""
    normal = [(-piece.score, place) for place, piece in enumerate(vocabulary.pieces) if piece.kind == Kind.NORMAL]
    unknown = vocabulary.texts(Kind.UNKNOWN)
    return models.BPE(
        {piece.text: place for place, piece in enumerate(vocabulary.pieces)},
        merges_by_rank([vocabulary.pieces[place].text for _, place in sorted(normal)]),
        unk_token=unknown[0] if unknown else None,
        fuse_unk=True,
        byte_fallback=bool(vocabulary.texts(Kind.BYTE)),
        ignore_merges=bool(vocabulary.texts(Kind.USER_DEFINED)),
    )


def _unigram(vocabulary: SentencePieces) -> models.Unigram:
    """The cut of a text with the best sum of scores.

    The sums are in double precision, in sentencepiece in single: of cuts with equal sums, such as `ii i`
    and `i ii`, the two may take different ones.
    """
    unknown = [place for place, piece in enumerate(vocabulary.pieces) if piece.kind == Kind.UNKNOWN]
    if not unknown:
        raise ClearheadError("the Unigram vocabulary has no piece for unknown text")
    return models.Unigram(
        [(piece.text, _unigram_score(piece)) for piece in vocabulary.pieces],
        unk_id=unknown[0],
        byte_fallback=bool(vocabulary.texts(Kind.BYTE)),
    )


def _unigram_score(piece: Piece) -> float:
    match piece.kind:
        case Kind.USER_DEFINED:  # measured on sentencepiece 0.2.2, through the scores of its best splits
            return 0.1 * (len(piece.text.encode()) - 1)
        case Kind.BYTE | Kind.UNUSED:
            return NEVER
        case _:
            return piece.score


def _exact_normalizer(vocabulary: SentencePieces) -> SentencePieceNormalizer | None:
    if not vocabulary.charsmap:
        return None
    return SentencePieceNormalizer(
        charsmap=Charsmap(vocabulary.charsmap),
        add_dummy_prefix=vocabulary.add_dummy_prefix,
        remove_extra_whitespaces=vocabulary.remove_extra_whitespaces,
        user_defined=tuple(vocabulary.texts(Kind.USER_DEFINED)),
    )


def _library_normalizer(vocabulary: SentencePieces) -> normalizers.Normalizer:
    """The steps that tokenizer.json can name; `Precompiled` is its nearest to a character map."""
    steps: list[normalizers.Normalizer] = []
    if vocabulary.charsmap:
        steps.append(normalizers.Precompiled(vocabulary.charsmap))
    if vocabulary.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    steps.append(normalizers.Replace(" ", SPACE))
    if vocabulary.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(rf"{SPACE}+\z"), ""))
    if vocabulary.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    return normalizers.Sequence(steps)
