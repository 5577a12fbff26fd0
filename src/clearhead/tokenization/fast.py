"""A `Tokenizer` run by the `tokenizers` library, whatever file its vocabulary came from.

tokenizer = FastTokenizer(tokenizers.Tokenizer.from_file("tokenizer.json"), SpecialTokens(eos="</s>"))
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import tokenizers
from tokenizers import AddedToken, NormalizedString, decoders, normalizers, processors

from clearhead.errors import ClearheadError
from clearhead.files import write_text
from clearhead.tokenization.base import StreamDecoder
from clearhead.tokenization.byte_level import from_byte_alphabet

# Tokens that end a reply wherever they are special tokens, since few files list them all.
# Names: llama.cpp, src/llama-vocab.cpp, its end-of-generation tokens.
ENDS_OF_TEXT = frozenset(("</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>"))
ENDS_OF_TURN = frozenset(("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>"))
# Of a tokenizer that was here before: readers would take them for this one's.
FILES_BEFORE = ("source.spm", "special_tokens_map.json", "chat_template.jinja")
# Stands for any text before a token; decoders leave a plain letter as it is.
SOME_TEXT = "a"
# Byte tokens that are no character on their own.
HIGH_BYTES = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(0x80, 0x100)}


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """The tokens with a role, by their text; `stops` end a reply besides `eos`."""

    bos: str | None = None
    eos: str | None = None
    pad: str | None = None
    unknown: str | None = None
    stops: tuple[str, ...] = ()

    def present(self) -> list[str]:
        """Every token that is named, once."""
        named = (self.bos, self.eos, self.pad, self.unknown, *self.stops)
        return list(dict.fromkeys(token for token in named if token is not None))


class TextNormalizer(Protocol):
    """A normaliser in Python, for what the library's own get wrong."""

    def normalize(self, normalized: NormalizedString) -> None:
        """Change the text in place; the library calls this for each text between added tokens."""

    def settings(self) -> dict[str, object]:
        """What tokenizer_config.json keeps so that loading finds the same normaliser."""


class FastTokenizer:
    """The `Tokenizer` of a library tokenizer, its special tokens and its chat template.

    A `normalizer` works in place of the library's own, which is what tokenizer.json then names.
    """

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        special: SpecialTokens,
        chat_template: str | None = None,
        normalizer: TextNormalizer | None = None,
    ) -> None:
        if isinstance(library.decoder, decoders.CTC):
            raise ClearheadError("the tokenizer has a CTC decoder, which is for speech and not for text")
        mark_special(library, special.present())
        # A file may ask for cut or padded texts; here a text is encoded as it is.
        library.no_truncation()
        library.no_padding()
        self._library = library
        self._special = special
        self._normalizer = normalizer
        self._portable_normalizer = library.normalizer
        if normalizer is not None:
            library.normalizer = normalizers.Normalizer.custom(normalizer)
        self.chat_template = chat_template

        added = library.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size = _vocab_size(library)
        self.bos_id = self._id(special.bos)
        self.eos_id = self._id(special.eos)
        self.pad_id = self._id(special.pad)
        self.unknown_id = self._id(special.unknown)
        self.stop_ids = self._stop_ids({token_id: token.content for token_id, token in added.items()})

        self._is_byte_level = self._joined(["Ġ"]) == " "
        self._has_byte_tokens = self._joined([SOME_TEXT, "<0x41>"]) == SOME_TEXT + "A"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        with library_errors(f"the text {text[:40]!r} cannot be encoded"):
            return self._library.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`, where a broken character is U+FFFD.

        The library's own decoder would lose to it the whole run of byte tokens it stands in.
        """
        decoder = StreamDecoder(self, skip_special_tokens)
        return "".join([decoder.push(token_id) for token_id in ids]) + decoder.finish()

    def token_bytes(self, token_id: int, after: int | None) -> bytes:
        previous = None if after is None else (self._token(after) or SOME_TEXT)
        return self._bytes_after(self._token(token_id) or "", previous)

    def token_text(self, token_id: int) -> str:
        token = self._token(token_id)
        if token is None:
            return f"<{token_id}>"
        if token_id in self._added_ids:
            return token
        return self._bytes_after(token, SOME_TEXT).decode("utf-8", "backslashreplace")

    def save(self, folder: str | Path) -> None:
        config: dict[str, object] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "bos_token": self._special.bos,
            "eos_token": self._special.eos,
            "pad_token": self._special.pad,
            "unk_token": self._special.unknown,
            "stop_tokens": list(self._special.stops),
            "chat_template": self.chat_template,
        }
        if self._normalizer is not None:
            config["text_normalizer"] = self._normalizer.settings()
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "tokenizer.json", self._portable_json())
        present = {key: value for key, value in config.items() if value not in (None, [])}
        write_text(folder / "tokenizer_config.json", json.dumps(present, indent=2))
        for name in FILES_BEFORE:
            (folder / name).unlink(missing_ok=True)

    def _portable_json(self) -> str:
        working = self._library.normalizer
        self._library.normalizer = self._portable_normalizer
        try:
            return self._library.to_str(pretty=True)
        finally:
            self._library.normalizer = working

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self._library.token_to_id(token)

    def _stop_ids(self, added: dict[int, str]) -> frozenset[int]:
        named = {self._special.eos, *self._special.stops} | ENDS_OF_TEXT | ENDS_OF_TURN
        return frozenset(token_id for token_id in self.special_ids if added[token_id] in named)

    def _token(self, token_id: int) -> str | None:
        if not 0 <= token_id < self.vocab_size:
            return None
        return self._library.id_to_token(token_id)

    def _joined(self, tokens: list[str]) -> str:
        decoder = self._library.decoder
        return " ".join(tokens) if decoder is None else decoder.decode(tokens)

    def _bytes_after(self, token: str, previous: str | None) -> bytes:
        """What `token` adds after `previous`: the decoder's text for both less its text for the first.

        Decoders look one token back at most: at the start of a text they drop a space, and some write
        the space after a word only when the next word comes.
        """
        if self._is_byte_level:
            return from_byte_alphabet(token)
        if self._has_byte_tokens and token in HIGH_BYTES:
            return HIGH_BYTES[token]
        if previous is None:
            return self._joined([token]).encode()
        if self._has_byte_tokens and previous in HIGH_BYTES:
            previous = SOME_TEXT
        return self._joined([previous, token])[len(self._joined([previous])) :].encode()


def _vocab_size(library: tokenizers.Tokenizer) -> int:
    ids = library.get_vocab(with_added_tokens=True).values()
    size = 1 + max(ids, default=-1)
    # Real vocabularies have a few holes at most; a model's tables will be as large as the largest id.
    if size > 2 * len(ids) + 1024:
        raise ClearheadError(f"the vocabulary has {len(ids)} tokens, but an id of {size - 1}")
    return size


@contextmanager
def library_errors(problem: str) -> Iterator[None]:
    """Around one call of the library: what it raises becomes a `ClearheadError` that starts with `problem`."""
    try:
        yield
    except BaseException as error:
        # The library raises plain Exception for whatever is wrong with its input, or panics: a panic of its
        # Rust code is a BaseException of a class that cannot be imported.
        is_from_library = isinstance(error, Exception) or type(error).__name__ == "PanicException"
        if isinstance(error, ClearheadError) or not is_from_library:
            raise
        raise ClearheadError(f"{problem}: {error}") from error


def mark_special(library: tokenizers.Tokenizer, tokens: Iterable[str]) -> None:
    """Make tokens of the vocabulary special: found whole in a text, left out when decoding."""
    special = {token.content for token in library.get_added_tokens_decoder().values() if token.special}
    new = [token for token in tokens if token not in special]
    for token in new:
        _known_id(library, token)
    library.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in new])


def frame(library: tokenizers.Tokenizer, first: str | None, last: str | None) -> None:
    """Let encoding put `first` before every text and `last` behind it (None: nothing)."""
    pieces = [*(["first"] if first else []), "$A", *(["last"] if last else [])]
    library.post_processor = processors.TemplateProcessing(
        single=pieces,
        pair=[*pieces, "$B:1", *(["last:1"] if last else [])],
        special_tokens=[
            {"id": role, "ids": [_known_id(library, token)], "tokens": [token]}
            for role, token in (("first", first), ("last", last))
            if token
        ],
    )


def _known_id(library: tokenizers.Tokenizer, token: str) -> int:
    token_id = library.token_to_id(token)
    if token_id is None:
        raise ClearheadError(f"the special token {token!r} is not in the vocabulary")
    return token_id
