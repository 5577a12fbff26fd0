"""LibraryTokenizer: a tokenizer that runs the `tokenizers` library, whatever file its vocabulary came from.

tokenizer = LibraryTokenizer(tokenizers.Tokenizer.from_file("tokenizer.json"), SpecialTokens(eos="</s>"))
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import tokenizers
from tokenizers import AddedToken, NormalizedString, decoders, normalizers, processors

from clearhead.errors import ClearheadError, quote, shorten
from clearhead.files import write_text
from clearhead.tokenization.byte_level import from_byte_alphabet
from clearhead.tokenization.interface import StreamDecoder

# Tokens that end a reply if they are special tokens, since few files list them all.
# Source: the end-of-generation tokens in llama.cpp, src/llama-vocab.cpp
_ENDS_OF_TEXT = frozenset(("</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>"))
_ENDS_OF_TURN = frozenset(("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>"))
# Files of another tokenizer in the same folder, which would be read as belonging to this one
_CONFLICTING_FILES = ("source.spm", "special_tokens_map.json", "chat_template.jinja")
_LONG_TEXT = 1 << 14  # characters, which take a few milliseconds
_MAX_LIBRARY_CHARACTERS = 500  # per message of the library, which can repeat any text of a file
# Stands for any text before a token; decoders do not change a plain letter.
_ANY_TEXT = "a"
# Byte tokens that are not a character by themselves
_HIGH_BYTES = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(0x80, 0x100)}


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """The texts of the tokens that have a role; `stops` end a reply, as `eos` does."""

    bos: str | None = None
    eos: str | None = None
    pad: str | None = None
    unknown: str | None = None
    classification: str | None = None
    separator: str | None = None
    mask: str | None = None
    stops: tuple[str, ...] = ()

    def present(self) -> list[str]:
        """Return the tokens that are not None, each once."""
        tokens = (self.bos, self.eos, self.pad, self.unknown, *self.stops)
        return list(dict.fromkeys(token for token in tokens if token is not None))


class TextNormalizer(Protocol):
    """A normalizer written in Python, for text that the library's own normalizers get wrong."""

    def normalize(self, normalized: NormalizedString) -> None:
        """Change the text in place; the library calls this for each text between added tokens."""

    def settings(self) -> dict[str, object]:
        """Return what tokenizer_config.json must hold for the same normalizer to be loaded again."""


class LibraryTokenizer:
    """A tokenizer from an object of the `tokenizers` library, its special tokens and its chat template.

    A `normalizer` replaces the library's own, which is still the one that tokenizer.json contains.
    """

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        special: SpecialTokens,
        chat_template: str | None = None,
        normalizer: TextNormalizer | None = None,
        literal_tokens: Iterable[str] = (),
    ) -> None:
        if isinstance(library.decoder, decoders.CTC):
            raise ClearheadError(
                "the tokenizer has a CTC decoder, which is for speech; only tokenizers of text are supported"
            )
        mark_special(library, special.present())
        # A file may ask for truncation or padding; here a text is always encoded in full.
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
        self._literal_ids = {self._id(token) for token in literal_tokens}  # decoded as they are, not as byte alphabet
        self._bytes_of: dict[int, bytes] = {}  # of byte-level tokens that have been decoded
        self.vocab_size = _vocab_size(library)
        self.bos_id = self._id(special.bos)
        self.eos_id = self._id(special.eos)
        self.pad_id = self._id(special.pad)
        self.unknown_id = self._id(special.unknown)
        self.stop_ids = self._stop_ids({token_id: token.content for token_id, token in added.items()})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`, by default with the special tokens that the model expects around it."""
        with convert_library_errors(f"the text {text[:40]!r} cannot be encoded"):
            if len(text) < _LONG_TEXT:
                return self._library.encode(text, add_special_tokens=add_special_tokens).ids
            # Only calls for batches release the interpreter's lock, so that other threads go on. The fast one does not
            # compute where tokens are in the text: for 1 MB, it takes 0.5 s instead of 1.2 s.
            return self._library.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_pair(self, text: str, second: str | None, max_tokens: int | None) -> tuple[list[int], list[int]]:
        """Return ids and token types of one or two texts, of which at most `max_tokens` tokens are kept."""
        texts = [text] if second is None else [text, second]
        with convert_library_errors(f"the text {text[:40]!r} cannot be encoded"):
            encodings = [self._library.encode(each, add_special_tokens=False) for each in texts]
            if max_tokens is not None:
                room = max(max_tokens - self._library.num_special_tokens_to_add(second is not None), 0)
                lengths = _fit_lengths([len(each) for each in encodings], room)
                for encoding, length in zip(encodings, lengths, strict=True):
                    encoding.truncate(length)
            first, following = encodings[0], encodings[1] if second is not None else None
            result = self._library.post_process(first, following, add_special_tokens=True)
        return result.ids, result.type_ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; an invalid character becomes U+FFFD.

        The library's own decoder would lose the whole run of byte tokens around it.
        """
        decoder = StreamDecoder(self, skip_special_tokens)
        return "".join([decoder.push(token_id) for token_id in ids]) + decoder.finish()

    def token_bytes(self, token_id: int, previous_id: int | None) -> bytes:
        """Return the UTF-8 bytes that a token adds to a text that ends in `previous_id` (None: an empty text)."""
        if token_id in self._literal_ids:
            return (self._token(token_id) or "").encode()
        if self._is_byte_level:  # whatever precedes it
            if token_id not in self._bytes_of:
                self._bytes_of[token_id] = from_byte_alphabet(self._token(token_id) or "")
            return self._bytes_of[token_id]
        previous = None if previous_id is None else (self._token(previous_id) or _ANY_TEXT)
        return self._bytes_after(self._token(token_id) or "", previous)

    def token_text(self, token_id: int) -> str:
        """Return one token in readable form: spaces as spaces, incomplete characters as `\\xe4`."""
        token = self._token(token_id)
        if token is None:
            return f"<{token_id}>"
        if token_id in self._added_ids:
            return token
        return self._bytes_after(token, _ANY_TEXT).decode("utf-8", "backslashreplace")

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json as Hugging Face libraries read them."""
        config: dict[str, object] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "bos_token": self._special.bos,
            "eos_token": self._special.eos,
            "pad_token": self._special.pad,
            "unk_token": self._special.unknown,
            "cls_token": self._special.classification,
            "sep_token": self._special.separator,
            "mask_token": self._special.mask,
            "stop_tokens": list(self._special.stops),
            "chat_template": self.chat_template,
        }
        if self._normalizer is not None:
            config["text_normalizer"] = self._normalizer.settings()
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "tokenizer.json", self.portable_json())
        present = {key: value for key, value in config.items() if value not in (None, [])}
        write_text(folder / "tokenizer_config.json", json.dumps(present, indent=2))
        for name in _CONFLICTING_FILES:
            (folder / name).unlink(missing_ok=True)

    def portable_json(self) -> str:
        """Return tokenizer.json with the library's own normalizer, since one in Python cannot be serialized."""
        current = self._library.normalizer
        self._library.normalizer = self._portable_normalizer
        try:
            return self._library.to_str(pretty=True)
        finally:
            self._library.normalizer = current

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self._library.token_to_id(token)

    def _stop_ids(self, added: dict[int, str]) -> frozenset[int]:
        stops = {self._special.eos, *self._special.stops} | _ENDS_OF_TEXT | _ENDS_OF_TURN
        return frozenset(token_id for token_id in self.special_ids if added[token_id] in stops)

    def _token(self, token_id: int) -> str | None:
        if not 0 <= token_id < self.vocab_size:
            return None
        return self._library.id_to_token(token_id)

    @cached_property
    def _is_byte_level(self) -> bool:
        return self._decode_tokens(["Ġ"]) == " "

    @cached_property
    def _has_byte_tokens(self) -> bool:
        return self._decode_tokens([_ANY_TEXT, "<0x41>"]) == _ANY_TEXT + "A"

    def _decode_tokens(self, tokens: list[str]) -> str:
        decoder = self._library.decoder
        if decoder is None:
            return " ".join(tokens)
        with convert_library_errors(f"the tokens {str(tokens)[:80]} cannot be decoded"):
            return decoder.decode(tokens)

    def _bytes_after(self, token: str, previous: str | None) -> bytes:
        """Return what `token` adds after `previous`: the decoded text of both minus the decoded text of the first.

        Decoders depend on one previous token at most: at the start of a text they drop a space, and some write the
        space after a word only when the next word follows.
        """
        if self._is_byte_level:
            return from_byte_alphabet(token)
        if self._has_byte_tokens and token in _HIGH_BYTES:
            return _HIGH_BYTES[token]
        if previous is None:
            return self._decode_tokens([token]).encode()
        if self._has_byte_tokens and previous in _HIGH_BYTES:
            previous = _ANY_TEXT
        return self._decode_tokens([previous, token])[len(self._decode_tokens([previous])) :].encode()


def _fit_lengths(lengths: list[int], room: int) -> list[int]:
    """Return how much of one or two texts to keep: the longer text is cut down first, then both are cut alike."""
    if sum(lengths) <= room:
        return lengths
    if len(lengths) == 1:
        return [room]
    short = min(*lengths, room // 2)
    return [short, room - short] if lengths[0] <= lengths[1] else [room - short, short]


def _vocab_size(library: tokenizers.Tokenizer) -> int:
    ids = library.get_vocab(with_added_tokens=True).values()
    size = 1 + max(ids, default=-1)
    # Real vocabularies have few unused ids; a model's tables will be as large as the largest id.
    if size > 2 * len(ids) + 1024:
        raise ClearheadError(
            f"the vocabulary has {len(ids)} tokens, but its largest id is {size - 1}; too many ids are unused"
        )
    return size


@contextmanager
def convert_library_errors(problem: str) -> Iterator[None]:
    """Turn whatever the library raises into a ClearheadError that starts with `problem`."""
    try:
        yield
    except BaseException as error:
        # The library raises plain Exception for any invalid input, or its Rust code panics: that is a BaseException
        # of a class that cannot be imported.
        is_from_library = isinstance(error, Exception) or type(error).__name__ == "PanicException"
        if isinstance(error, ClearheadError) or not is_from_library:
            raise
        raise ClearheadError(f"{problem}: {shorten(str(error), _MAX_LIBRARY_CHARACTERS)}") from error


def mark_special(library: tokenizers.Tokenizer, tokens: Iterable[str]) -> None:
    """Make tokens of the vocabulary special: they are matched as a whole in a text, and skipped in decoding."""
    special = {token.content for token in library.get_added_tokens_decoder().values() if token.special}
    new = [token for token in tokens if token not in special]
    for token in new:
        _known_id(library, token)
    library.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in new])


def set_framing_tokens(library: tokenizers.Tokenizer, first: str | None, last: str | None) -> None:
    """Make encoding put `first` before every text and `last` after it (None: nothing)."""
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
        raise ClearheadError(f"the special token {quote(token)} is not in the vocabulary")
    return token_id
