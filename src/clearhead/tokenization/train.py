"""Train a tokenizer: learn a vocabulary from texts.

    tokenizer = train_tokenizer(texts, kind="bpe", vocab_size=8000)
    tokenizer.save("my-tokenizer")                        # load_tokenizer("my-tokenizer") reads it

The algorithms are those of the `tokenizers` library; this module defines how each kind splits text, and which special
tokens it adds.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Literal, get_args

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from clearhead.errors import ClearheadError, unknown_name
from clearhead.tokenization.byte_level import BYTE_ALPHABET, byte_level_bpe
from clearhead.tokenization.characters import byte_tokenizer, character_tokenizer
from clearhead.tokenization.library_tokenizer import (
    LibraryTokenizer,
    SpecialTokens,
    convert_library_errors,
    set_framing_tokens,
)
from clearhead.tokenization.pre_tokenization import GPT2

TokenizerKind = Literal["bpe", "unigram", "wordpiece", "byte", "character"]
_MAX_VOCAB_SIZE = 2**22  # the largest released vocabulary, XLM-V's, has a million; the library allocates all at once

# The special tokens of the models that introduced each kind: GPT-2, T5 and ALBERT, BERT
_DEFAULT_SPECIAL_TOKENS = {
    "bpe": SpecialTokens(eos="<|endoftext|>"),
    "unigram": SpecialTokens(bos="<s>", eos="</s>", pad="<pad>", unknown="<unk>"),
    "wordpiece": SpecialTokens(bos="[CLS]", eos="[SEP]", pad="[PAD]", unknown="[UNK]"),
    "byte": SpecialTokens(eos="<|endoftext|>"),
    "character": SpecialTokens(unknown="<|unknown|>"),
}


def train_tokenizer(
    texts: Iterable[str],
    kind: TokenizerKind = "bpe",
    vocab_size: int | None = None,
    special_tokens: SpecialTokens | None = None,
    extra_tokens: Sequence[str] = (),
) -> LibraryTokenizer:
    """Return a tokenizer of at most `vocab_size` tokens, of which the special tokens come first.

    `extra_tokens` are special tokens without a role, such as a mask or sentinels. The kinds "byte" and "character" have
    as many tokens as there are bytes or characters, and accept neither extra tokens nor a size.
    """
    if kind not in _DEFAULT_SPECIAL_TOKENS:
        raise unknown_name("kind of tokenizer", kind, get_args(TokenizerKind))
    special = special_tokens or _DEFAULT_SPECIAL_TOKENS[kind]
    if "" in (*special.present(), *extra_tokens):
        raise ClearheadError("a special token is empty; it must have at least one character")
    size = _check_size(kind, vocab_size, extra_tokens)
    texts = _nonempty(texts)
    if size is None:
        return byte_tokenizer(special) if kind == "byte" else character_tokenizer(chain.from_iterable(texts), special)
    return _train(texts, kind, size, special, [*special.present(), *extra_tokens])


def _check_size(kind: str, vocab_size: int | None, extra_tokens: Sequence[str]) -> int | None:
    """Return the size of a vocabulary that is learned, or None. Raise ClearheadError if the kind does not allow it."""
    if kind in ("byte", "character"):
        if vocab_size is not None or extra_tokens:
            raise ClearheadError(
                f"the {kind}s determine the vocabulary of a {kind} tokenizer; leave out vocab_size and extra tokens"
            )
        return None
    if vocab_size is None:
        raise ClearheadError(f"a {kind} tokenizer needs a vocab_size, such as 8000")
    if not 1 <= vocab_size <= _MAX_VOCAB_SIZE:
        raise ClearheadError(f"vocab_size is {vocab_size}; it must be from 1 to {_MAX_VOCAB_SIZE}")
    return vocab_size


def _train(
    texts: Iterator[str], kind: str, vocab_size: int, special: SpecialTokens, reserved: list[str]
) -> LibraryTokenizer:
    build = {"bpe": _bpe, "unigram": _unigram, "wordpiece": _wordpiece}[kind]
    with convert_library_errors(f"a {kind} vocabulary of {vocab_size} tokens cannot be learned from these texts"):
        library, trainer = build(special, vocab_size, [AddedToken(token, special=True) for token in reserved])
        library.train_from_iterator(texts, trainer)
    if library.get_vocab_size() > vocab_size:
        raise ClearheadError(
            f"vocab_size is {vocab_size}; it must be {library.get_vocab_size()} or more, "
            "to include the single characters and special tokens"
        )
    if kind == "wordpiece":  # as BERT expects a text
        set_framing_tokens(library, special.bos, special.eos)
    return LibraryTokenizer(library, special)


def _bpe(special: SpecialTokens, vocab_size: int, reserved: list[AddedToken]) -> tuple[tokenizers.Tokenizer, Any]:
    """Return byte-level BPE with GPT-2's pattern, which encodes every text without loss, and its trainer."""
    library = byte_level_bpe({}, merges=[], patterns=[GPT2])
    alphabet = list(BYTE_ALPHABET)
    return library, trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=reserved, initial_alphabet=alphabet, show_progress=False
    )


def _unigram(special: SpecialTokens, vocab_size: int, reserved: list[AddedToken]) -> tuple[tokenizers.Tokenizer, Any]:
    """Return Unigram (Kudo 2018) over words with the space before them, as in SentencePiece, and its trainer."""
    if special.unknown is None:
        raise ClearheadError("a unigram tokenizer needs an unknown token for characters it has not seen")
    library = tokenizers.Tokenizer(models.Unigram())
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    return library, trainers.UnigramTrainer(
        vocab_size=vocab_size, special_tokens=reserved, unk_token=special.unknown, show_progress=False
    )


def _wordpiece(special: SpecialTokens, vocab_size: int, reserved: list[AddedToken]) -> tuple[tokenizers.Tokenizer, Any]:
    """Return WordPiece over lower-case words and punctuation (Devlin et al. 2018), and its trainer."""
    if special.unknown is None:
        raise ClearheadError("a wordpiece tokenizer needs an unknown token for words that it cannot encode")
    library = tokenizers.Tokenizer(models.WordPiece(unk_token=special.unknown))
    library.normalizer = normalizers.BertNormalizer(lowercase=True)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    return library, trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=reserved, show_progress=False)


def _nonempty(texts: Iterable[str]) -> Iterator[str]:
    """Return the texts that are not empty; raise ClearheadError if there are none."""
    if isinstance(texts, str):  # iterating would give single characters
        raise ClearheadError(f"the texts are a single string, {texts[:40]!r}; pass a list of texts")
    nonempty = (text for text in texts if text)
    first = next(nonempty, None)
    if first is None:
        raise ClearheadError("there is no text to learn a vocabulary from: the corpus is empty")
    return chain([first], nonempty)
