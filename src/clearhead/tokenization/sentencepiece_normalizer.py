"""Normalize text as SentencePiece does if its model has a character map.

    normalizer.apply("ﬁne  day")   # '▁fine▁day'

For models without a map, the library's own normalizers suffice.
"""

import base64
import re
from dataclasses import dataclass
from functools import cached_property

from tokenizers import NormalizedString

from clearhead.errors import ClearheadError
from clearhead.tokenization.character_map import CharacterMap

META_SPACE = "▁"  # what SentencePiece writes instead of a space


@dataclass(frozen=True, kw_only=True)
class SentencePieceNormalizer:
    """Applies the character map, then handles spaces, then adds the prefix (sentencepiece, src/normalizer.cc)."""

    character_map: CharacterMap
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    user_defined: tuple[str, ...]

    @classmethod
    def from_saved(cls, settings: object, library_normalizer: object) -> "SentencePieceNormalizer":
        """Return the normalizer saved as `settings` in tokenizer_config.json and as the map in tokenizer.json."""
        match settings, library_normalizer:
            case (
                {
                    "add_dummy_prefix": bool(add_dummy_prefix),
                    "remove_extra_whitespaces": bool(remove_extra_whitespaces),
                    "user_defined": list(user_defined),
                },
                {"normalizers": [{"precompiled_charsmap": str(encoded)}, *_]},
            ) if all(isinstance(piece, str) for piece in user_defined):
                return cls(
                    character_map=CharacterMap(base64.b64decode(encoded)),
                    add_dummy_prefix=add_dummy_prefix,
                    remove_extra_whitespaces=remove_extra_whitespaces,
                    user_defined=tuple(user_defined),
                )
        raise ClearheadError("text_normalizer in tokenizer_config.json does not match tokenizer.json")

    def settings(self) -> dict[str, object]:
        """Return what tokenizer_config.json must hold, besides the map, to load this normalizer again."""
        return {
            "add_dummy_prefix": self.add_dummy_prefix,
            "remove_extra_whitespaces": self.remove_extra_whitespaces,
            "user_defined": list(self.user_defined),
        }

    def normalize(self, normalized: NormalizedString) -> None:
        """Normalize the library's text in place."""
        text = self.apply(normalized.normalized)
        normalized.clear()
        normalized.append(text)

    def apply(self, text: str) -> str:
        """Return the normalized text."""
        if not text:
            return ""
        parts = self._user_defined_pattern.split(text)  # every second part is a user-defined piece
        mapped = "".join(part if index % 2 else self.character_map.apply(part) for index, part in enumerate(parts))
        if self.remove_extra_whitespaces:
            mapped = re.sub(" +", " ", mapped.lstrip(" "))
        mapped = (META_SPACE if self.add_dummy_prefix else "") + mapped.replace(" ", META_SPACE)
        return mapped.rstrip(META_SPACE) if self.remove_extra_whitespaces else mapped

    @cached_property
    def _user_defined_pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self.user_defined, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
