"""SentencePiece's precompiled character map: replace the longest known prefix, again and again.

    Charsmap(blob).apply("ﬁne ①")   # 'fine 1' with the NFKC map

The blob holds a trie of prefixes as a double array (darts-clone) and the replacement texts:

    uint32 trie bytes | trie units, uint32 each | replacements, each ended by a zero byte

The library's own `Precompiled` normaliser goes by grapheme instead of by prefix, and loses characters.
"""

import struct
from itertools import pairwise

from clearhead.errors import ClearheadError


class Charsmap:
    """The rules of one map."""

    def __init__(self, blob: bytes) -> None:
        if len(blob) < 4:
            raise ClearheadError(f"the character map has {len(blob)} bytes; a whole one has more than 4")
        (trie_bytes,) = struct.unpack_from("<I", blob)
        if trie_bytes < 4 or trie_bytes % 4 or 4 + trie_bytes > len(blob):
            raise ClearheadError(
                f"the character map promises {trie_bytes} bytes of trie, but {len(blob) - 4} bytes follow"
            )
        self._units = struct.unpack_from(f"<{trie_bytes // 4}I", blob, 4)
        self._replacements = blob[4 + trie_bytes :]
        self._single = _SingleCharacters(self)

    def apply(self, text: str) -> str:
        if any(self._goes_on(first + second) for first, second in set(pairwise(text))):
            return self._replace_prefixes(text.encode())
        return text.translate(self._single)

    def _replace_prefixes(self, text: bytes) -> str:
        pieces = []
        start = 0
        while start < len(text):
            matched, replacement, _ = self._longest_prefix(text, start)
            if not matched:
                matched = _character_bytes(text[start])
                replacement = text[start : start + matched]
            pieces.append(replacement)
            start += matched
        return b"".join(pieces).decode("utf-8", "replace")

    def _goes_on(self, pair: str) -> bool:
        """Whether some rule starts with these two characters."""
        text = pair.encode()
        return self._longest_prefix(text, 0)[2] == len(text)

    def _longest_prefix(self, text: bytes, start: int) -> tuple[int, bytes, int]:
        """The bytes that the longest rule at `start` replaces and what by, and how far the trie went.

        A unit's child for byte c is at `position ^ offset ^ c` and carries c as its label; its leaf is the
        child for byte 0 (darts-clone, include/darts.h). Bits of a unit: 0-7 the label, 8 there is a leaf, 9
        the offset is shifted by 8, 10-30 the offset; of a leaf: 0-30 the value, 31 set.
        """
        units = self._units
        position, unit = 0, units[0]
        matched, value = 0, 0
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
                matched, value = end - start, units[leaf] & 0x7FFFFFFF
        return matched, self._replacement(value) if matched else b"", end - start

    def _replacement(self, start: int) -> bytes:
        end = self._replacements.find(b"\0", start)
        if end < 0:
            raise ClearheadError("the character map points outside its replacement texts")
        return self._replacements[start:end]


class _SingleCharacters(dict[int, str]):
    """The rules of one character, as `str.translate` asks for them; each is looked up once."""

    def __init__(self, charsmap: Charsmap) -> None:
        super().__init__()
        self._charsmap = charsmap

    def __missing__(self, code_point: int) -> str:
        self[code_point] = self._charsmap._replace_prefixes(chr(code_point).encode())
        return self[code_point]


def _offset(unit: int) -> int:
    return (unit >> 10) << (8 if unit & 0x200 else 0)


def _character_bytes(first: int) -> int:
    """The length of a UTF-8 character by its first byte."""
    return 1 if first < 0x80 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4
