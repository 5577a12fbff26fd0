"""How SentencePiece prepares text when its model has a character map.

    normalizer.apply("ﬁne  day")   # '▁fine▁day'

Models without a map need only what the library's own normalisers do.
"""

import base64
import re
from dataclasses import dataclass
from functools import cached_property

from tokenizers import NormalizedString

from clearhead.errors import ClearheadError
from clearhead.files import parse_json
from clearhead.tokenization.charsmap import Charsmap

SPACE = "▁"


@dataclass(frozen=True, kw_only=True)
class SentencePieceNormalizer:
    """The map, then spaces, then the dummy prefix: sentencepiece, src/normalizer.cc."""

    charsmap: Charsmap
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    user_defined: tuple[str, ...]

    @classmethod
    def from_saved(cls, settings: object, tokenizer_json: bytes) -> "SentencePieceNormalizer":
        """The normaliser that was saved as `settings` and as the map in tokenizer.json."""
        match settings, parse_json(tokenizer_json.decode(), "tokenizer.json is "):
            case (
                {
                    "add_dummy_prefix": bool(add_dummy_prefix),
                    "remove_extra_whitespaces": bool(remove_extra_whitespaces),
                    "user_defined": list(user_defined),
                },
                {"normalizer": {"normalizers": [{"precompiled_charsmap": str(encoded)}, *_]}},
            ) if all(isinstance(piece, str) for piece in user_defined):
                return cls(
                    charsmap=Charsmap(base64.b64decode(encoded)),
                    add_dummy_prefix=add_dummy_prefix,
                    remove_extra_whitespaces=remove_extra_whitespaces,
                    user_defined=tuple(user_defined),
                )
        raise ClearheadError("text_normalizer in tokenizer_config.json does not fit tokenizer.json")

    def settings(self) -> dict[str, object]:
        return {
            "add_dummy_prefix": self.add_dummy_prefix,
            "remove_extra_whitespaces": self.remove_extra_whitespaces,
            "user_defined": list(self.user_defined),
        }

    def normalize(self, normalized: NormalizedString) -> None:
        text = self.apply(normalized.normalized)
        normalized.clear()
        normalized.append(text)

    def apply(self, text: str) -> str:
        if not text:
            return ""
        parts = self._user_defined_pattern.split(text)  # each second part is a user-defined piece
        mapped = "".join(part if place % 2 else self.charsmap.apply(part) for place, part in enumerate(parts))
        if self.remove_extra_whitespaces:
            mapped = re.sub(" +", " ", mapped.lstrip(" "))
        mapped = (SPACE if self.add_dummy_prefix else "") + mapped.replace(" ", SPACE)
        return mapped.rstrip(SPACE) if self.remove_extra_whitespaces else mapped

    @cached_property
    def _user_defined_pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self.user_defined, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
