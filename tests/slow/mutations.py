"""Damage the content of a file at random: its bytes, its text, its numbers, or the values of its JSON.

damaged = mutate(content, "json", random.Random(7))
"""

import json
import random
import re
import struct
from collections.abc import Callable
from typing import Any

Mutation = Callable[[bytes, random.Random], bytes]

INTEGERS = [0, 1, 2, 7, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**60, 2**63 - 1, 2**63, 2**64 - 1]
NUMBERS = ["0", "-1", "1", "3", "0.5", "-0.0", "1e308", "1e-320", "NaN", "Infinity", "1e999", *map(str, INTEGERS)]
NUMBERS += ["9" * 40, "9" * 5000, "1e", "0x10", "00", "1_000", "-", "+1", "1.5.2"]
TEXTS = ["", "a", "\x00", "é", "漢", "👍", "\u202e", "\x1b[31m", "x" * 1000, "../../etc/passwd", "/dev/zero", "%s%n"]
TEXTS += ["{", "[" * 300, '"', "\\", "\\ud800", "{{", "{% for x in y %}", "\n\n", "\r", "\t", ","]
TEXTS += ["null", "#", "=", "[a]"]


def odd_values() -> list[Any]:
    """Return JSON values that are rarely expected."""
    deep: Any = 0
    for _ in range(80):
        deep = [deep]
    return [
        *(None, True, False, 0, -1, 1, 2, 3, 7, 0.5, -0.5, 1e308, float("nan"), float("inf"), 2**31, 2**63, 10**30),
        *("", "a", "\ud800", "\x1b[31m", "x" * 1000, "é漢👍", "1", "none", "/dev/zero", "../x"),
        *(".*", "(a+)+$", "[", "\\"),
        *([], {}, [[]], [0] * 100, ["a"], {"a": 1}, [None], [-1, 2**40], {"type": "x"}, deep),
    ]


def mutate(content: bytes, form: str, chance: random.Random) -> bytes:
    """Return a damaged copy. `form` is json, json lines, text, header (binary after a header) or binary."""
    mutations = {
        "json": (_change_json, _change_json, _change_json, _change_text, _change_bytes),
        "json lines": (_change_json_line, _change_json_line, _change_text, _change_bytes),
        "text": (_change_text, _change_text, _change_number, _change_bytes),
        "header": (_change_header, _change_header, _change_header, _change_bytes, _cut),
        "binary": (_change_integer, _change_bytes, _change_bytes, _cut),
    }[form]
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        content = chance.choice(mutations)(content, chance)
    return content


# --- JSON


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value inside a JSON value."""
    items: list[Any] = list(value.items()) if isinstance(value, dict) else []
    items = list(enumerate(value)) if isinstance(value, list) else items
    if len(items) > 60:  # a vocabulary: some entries stand for all
        items = items[:30] + items[-30:]
    return [path] * bool(path) + [found for key, inner in items for found in _paths(inner, (*path, key))]


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _change_json(content: bytes, chance: random.Random) -> bytes:
    try:
        value = json.loads(content)
        paths = _paths(value)
    except (ValueError, RecursionError):
        return _change_text(content, chance)
    if not paths:
        return json.dumps(chance.choice(odd_values())).encode()
    path = chance.choice(paths)
    owner, key = _at(value, path[:-1]), path[-1]
    match chance.randrange(6):
        case 0 | 1 | 2:
            owner[key] = chance.choice(odd_values())
        case 3:
            del owner[key]
        case 4:
            owner[key] = _at(value, chance.choice(paths)) if chance.random() < 0.5 else _scaled(owner[key], chance)
        case 5 if isinstance(owner, dict):
            owner[chance.choice(["extra", "type", "", str(key) + "x"])] = owner.pop(key)
        case _:
            owner[key] = _scaled(owner[key], chance)
    try:
        return json.dumps(value, ensure_ascii=chance.random() < 0.5).encode(errors="surrogatepass")
    except (ValueError, RecursionError):  # a value inside itself
        return content[: chance.randrange(len(content) + 1)]


def _scaled(value: Any, chance: random.Random) -> Any:
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return chance.choice([-value, value * 2, value + 1, value - 1, value * 10**6, str(value), [value], value + 0.5])
    if isinstance(value, str):
        return chance.choice([value * 2, value[1:], value.upper(), [value], value + "\n", value[::-1], value * 500])
    return chance.choice([value * 2, value[1:], value[::-1]]) if isinstance(value, list) else list(value)


def _change_json_line(content: bytes, chance: random.Random) -> bytes:
    lines = content.split(b"\n")
    number = chance.randrange(len(lines))
    lines[number] = _change_json(lines[number], chance)
    return b"\n".join(lines)


# --- text


def _change_text(content: bytes, chance: random.Random) -> bytes:
    begin = chance.randrange(len(content) + 1)
    end = min(begin + chance.choice((0, 1, 1, 4, 30)), len(content))
    match chance.randrange(4):
        case 0:
            return content[:begin] + chance.choice(TEXTS).encode() + content[end:]
        case 1:
            return content[:begin] + content[end:]
        case 2:
            other = chance.randrange(len(content) + 1)
            return content[:begin] + content[other : other + chance.choice((1, 5, 60))] + content[begin:]
    return _change_number(content, chance)


def _change_number(content: bytes, chance: random.Random) -> bytes:
    found = list(re.finditer(rb"-?\d+(\.\d+)?", content[: 1 << 16]))
    if not found:
        return _change_bytes(content, chance)
    number = chance.choice(found)
    return content[: number.start()] + chance.choice(NUMBERS).encode() + content[number.end() :]


# --- bytes


def _change_bytes(content: bytes, chance: random.Random) -> bytes:
    if not content:
        return chance.randbytes(chance.randrange(20))
    changed, place = bytearray(content), chance.randrange(len(content))
    match chance.randrange(4):
        case 0:
            changed[place] ^= 1 << chance.randrange(8)
        case 1:
            changed[place] = chance.choice((0, 1, 127, 128, 255))
        case 2:
            changed[place : place + chance.randrange(1, 40)] = chance.randbytes(chance.randrange(40))
        case _:
            return _cut(content, chance)
    return bytes(changed)


def _cut(content: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(content) + 1)
    match chance.randrange(4):
        case 0:
            return content[:place]
        case 1:
            return content + chance.randbytes(chance.randrange(1, 100))
        case 2:
            return content[:place] + content[place + chance.randrange(1, 100) :]
    return content[place:]


def _change_integer(content: bytes, chance: random.Random) -> bytes:
    return _write_integer(content, chance, len(content))


def _change_header(content: bytes, chance: random.Random) -> bytes:
    """Change a number, a byte or a text among the first bytes, where most formats describe the rest."""
    border = min(len(content), chance.choice((16, 64, 512, 4096)))
    match chance.randrange(4):
        case 0:
            return _change_bytes(content[:border], chance) + content[border:]
        case 1:
            return _change_number(content[:border], chance) + content[border:]
        case 2:  # of the same length, so that what follows stays in place
            found = list(re.finditer(rb"\d", content[:border]))
            if found:
                place = chance.choice(found).start()
                return content[:place] + str(chance.randrange(10)).encode() + content[place + 1 :]
    return _write_integer(content, chance, border)


def _write_integer(content: bytes, chance: random.Random, border: int) -> bytes:
    num_bytes = chance.choice((1, 2, 4, 4, 8, 8))
    place = chance.randrange(max(border - num_bytes + 1, 1))
    place -= place % 4 if chance.random() < 0.5 else 0
    value = chance.choice(INTEGERS) & (2 ** (8 * num_bytes) - 1)
    return content[:place] + struct.pack("<Q", value)[:num_bytes] + content[place + num_bytes :]
