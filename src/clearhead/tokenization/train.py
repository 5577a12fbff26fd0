"""Learn a vocabulary from texts.

    tokenizer = train_tokenizer(texts, kind="bpe", vocab_size=8000)
    tokenizer.save("my-tokenizer")                        # load_tokenizer("my-tokenizer") reads it

The algorithms are those of the `tokenizers` library; here stands how text is cut and framed around them.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Literal, get_args

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from clearhead.errors import ClearheadError, unknown_name
from clearhead.tokenization.byte_level import BYTE_ALPHABET, byte_level_bpe
from clearhead.tokenization.characters import byte_tokenizer, character_tokenizer
from clearhead.tokenization.fast import FastTokenizer, SpecialTokens, frame, library_errors
from clearhead.tokenization.splits import GPT2

Kind = Literal["bpe", "unigram", "wordpiece", "byte", "character"]
MAX_VOCAB_SIZE = 2**22  # the largest released, XLM-V's, has a million; the library makes room for all at once

# As the model that made each kind known has them: GPT-2, T5 and ALBERT, BERT.
USUAL_SPECIAL_TOKENS = {
    "bpe": SpecialTokens(eos="<|endoftext|>"),
    "unigram": SpecialTokens(bos="<s>", eos="</s>", pad="<pad>", unknown="<unk>"),
    "wordpiece": SpecialTokens(bos="[CLS]", eos="[SEP]", pad="[PAD]", unknown="[UNK]"),
    "byte": SpecialTokens(eos="<|endoftext|>"),
    "character": SpecialTokens(unknown="<|unknown|>"),
}


def train_tokenizer(
    texts: Iterable[str],
    kind: Kind = "bpe",
    vocab_size: int | None = None,
    special_tokens: SpecialTokens | None = None,
    extra_tokens: Sequence[str] = (),
) -> FastTokenizer:
    """A tokenizer of at most `vocab_size` tokens, special ones included, which come first.

    `extra_tokens` are special without a role, such as a mask or sentinels. The byte and character kinds have as many
    tokens as there are bytes or characters, and take neither these nor a size.
    """
    if kind not in USUAL_SPECIAL_TOKENS:
        raise unknown_name("kind of tokenizer", kind, get_args(Kind))
    special = special_tokens or USUAL_SPECIAL_TOKENS[kind]
    if "" in (*special.present(), *extra_tokens):
        raise ClearheadError("a special token is empty; it must have a text")
    texts = _with_content(texts)
    if kind in ("byte", "character"):
        if vocab_size is not None or extra_tokens:
            raise ClearheadError(f"a {kind} tokenizer takes no vocab_size and no extra tokens: its text decides")
        return byte_tokenizer(special) if kind == "byte" else character_tokenizer(chain.from_iterable(texts), special)
    if vocab_size is None:
        raise ClearheadError(f"a {kind} tokenizer needs a vocab_size, such as 8000")
    if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
        raise ClearheadError(f"vocab_size is {vocab_size}; it must be from 1 to {MAX_VOCAB_SIZE}")
    return _learn(texts, kind, vocab_size, special, [*special.present(), *extra_tokens])


def _learn(
    texts: Iterator[str], kind: str, vocab_size: int, special: SpecialTokens, reserved: list[str]
) -> FastTokenizer:
    build = {"bpe": _bpe, "unigram": _unigram, "wordpiece": _wordpiece}[kind]
    with library_errors(f"a {kind} vocabulary of {vocab_size} tokens cannot be learnt from these texts"):
        library, trainer = build(special, vocab_size, [AddedToken(token, special=True) for token in reserved])
        library.train_from_iterator(texts, trainer)
    if library.get_vocab_size() > vocab_size:
        raise ClearheadError(
            f"vocab_size is {vocab_size}; it must be {library.get_vocab_size()} or more, "
            "to hold the single characters and special tokens"
        )
    if kind == "wordpiece":  # a text as BERT reads it
        frame(library, special.bos, special.eos)
    return FastTokenizer(library, special)


def _bpe(special: SpecialTokens, vocab_size: int, reserved: list[AddedToken]) -> tuple[tokenizers.Tokenizer, Any]:
    """Byte-level, cut as GPT-2 cuts: every text can be written, and comes back as it was."""
    library = byte_level_bpe({}, merges=[], splits=[GPT2])
    alphabet = list(BYTE_ALPHABET)
    return library, trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=reserved, initial_alphabet=alphabet, show_progress=False
    )


def _unigram(special: SpecialTokens, vocab_size: int, reserved: list[AddedToken]) -> tuple[tokenizers.Tokenizer, Any]:
    """Words with the space before them, as SentencePiece writes them (Kudo 2018)."""
    if special.unknown is None:
        raise ClearheadError("a unigram tokenizer needs an unknown token for characters it has not seen")
    library = tokenizers.Tokenizer(models.Unigram())
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    return library, trainers.UnigramTrainer(
        vocab_size=vocab_size, special_tokens=reserved, unk_token=special.unknown, show_progress=False
    )


def _wordpiece(special: SpecialTokens, vocab_size: int, reserved: list[AddedToken]) -> tuple[tokenizers.Tokenizer, Any]:
    """Words and punctuation in small letters, cut from the left (Devlin et al. 2018)."""
    if special.unknown is None:
        raise ClearheadError("a wordpiece tokenizer needs an unknown token for words it cannot write")
    library = tokenizers.Tokenizer(models.WordPiece(unk_token=special.unknown))
    library.normalizer = normalizers.BertNormalizer(lowercase=True)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    return library, trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=reserved, show_progress=False)


def _with_content(texts: Iterable[str]) -> Iterator[str]:
    """The texts that are not empty, of which there must be one."""
    if isinstance(texts, str):  # it would be taken letter by letter
        raise ClearheadError(f"the texts are one text, {texts[:40]!r}; give a list of texts")
    filled = (text for text in texts if text)
    first = next(filled, None)
    if first is None:
        raise ClearheadError("there is no text to learn a vocabulary from; the corpus is empty")
    return chain([first], filled)
