"""SentencePiece's precompiled character map, which replaces the longest matching prefix again and again.

    CharacterMap(blob).apply("ﬁne ①")   # 'fine 1' with the NFKC map

The blob holds a trie of prefixes as a double array (darts-clone) and the replacement texts:

    uint32 trie bytes | trie units, uint32 each | replacements, each ended by a zero byte

The library's own `Precompiled` normalizer matches graphemes instead of prefixes, and loses characters.
"""

import struct
from itertools import pairwise

from clearhead.errors import ClearheadError
from clearhead.tokenization.tokenizer_limits import check_character_map


class CharacterMap:
    """The replacement rules of one map."""

    def __init__(self, blob: bytes) -> None:
        if len(blob) < 4:
            raise ClearheadError(f"the character map has {len(blob)} bytes; it must have more than 4")
        check_character_map(blob)
        (trie_bytes,) = struct.unpack_from("<I", blob)
        if trie_bytes < 4 or trie_bytes % 4 or 4 + trie_bytes > len(blob):
            raise ClearheadError(
                f"the trie of the character map has {trie_bytes} bytes; it must have a multiple of 4, "
                f"at most {len(blob) - 4}"
            )
        self._units = struct.unpack_from(f"<{trie_bytes // 4}I", blob, 4)
        self._replacements = blob[4 + trie_bytes :]
        self._single_characters = _SingleCharacterRules(self)

    def apply(self, text: str) -> str:
        """Return the text with all replacements made."""
        if any(self._starts_a_rule(first + second) for first, second in set(pairwise(text))):
            return self._replace_prefixes(text.encode())
        return text.translate(self._single_characters)

    def _replace_prefixes(self, text: bytes) -> str:
        pieces = []
        start = 0
        while start < len(text):
            num_matched, replacement, _ = self._longest_prefix(text, start)
            if not num_matched:
                num_matched = _character_bytes(text[start])
                replacement = text[start : start + num_matched]
            pieces.append(replacement)
            start += num_matched
        return b"".join(pieces).decode("utf-8", "replace")

    def _starts_a_rule(self, pair: str) -> bool:
        """Return whether some rule starts with these two characters."""
        text = pair.encode()
        return self._longest_prefix(text, 0)[2] == len(text)

    def _longest_prefix(self, text: bytes, start: int) -> tuple[int, bytes, int]:
        """Return how many bytes the longest rule at `start` replaces, by what, and how many bytes the trie followed.

        A unit's child for byte c is at `position ^ offset ^ c` and carries c as its label; its leaf is the child for
        byte 0 (darts-clone, include/darts.h). Bits of a unit: 0-7 the label, 8 whether there is a leaf, 9 whether the
        offset is shifted by 8, 10-30 the offset; of a leaf: 0-30 the value, 31 set.
        """
        units = self._units
        position, unit = 0, units[0]
        num_matched, value = 0, 0
        end = start
        while end < len(text):
            position ^= _offset(unit) ^ text[end]
            if position >= len(units) or (unit := units[position]) & 0x800000FF != text[end]:
                break
            end += 1
            if unit & 0x100:
                leaf = position ^ _offset(unit)
                if leaf >= len(units):
                    raise ClearheadError("the character map is not a well-formed trie")
                num_matched, value = end - start, units[leaf] & 0x7FFFFFFF
        return num_matched, self._replacement(value) if num_matched else b"", end - start

    def _replacement(self, start: int) -> bytes:
        end = self._replacements.find(b"\0", start)
        if end < 0:
            raise ClearheadError("the character map refers to a position outside its replacement texts")
        return self._replacements[start:end]


class _SingleCharacterRules(dict[int, str]):
    """The rules for single characters as a table for `str.translate`; each is looked up once."""

    def __init__(self, character_map: CharacterMap) -> None:
        super().__init__()
        self._character_map = character_map

    def __missing__(self, code_point: int) -> str:
        self[code_point] = self._character_map._replace_prefixes(chr(code_point).encode())
        return self[code_point]


def _offset(unit: int) -> int:
    return (unit >> 10) << (8 if unit & 0x200 else 0)


def _character_bytes(first: int) -> int:
    """Return the length of a UTF-8 character by its first byte."""
    return 1 if first < 0x80 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4
