"""Two thousand damaged GGUF files: each is read whole or refused with a ClearheadError, soon and in little memory.

Opening may allocate twice the file's size plus a constant for a few hundred small Python objects. Reading a
tensor allocates by its own size, which opening has checked: its stored bytes and at most 13 bytes of float32
for each of them (Q2_K: 84 bytes hold 256 values).
"""

import random
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from clearhead.checkpoint.gguf import StringArray, open_gguf
from clearhead.checkpoint.gguf_blocks import BLOCK_TYPES
from clearhead.errors import ClearheadError
from tests.checkpoint.gguf_files import ARRAY, STRING, array, gguf, pair, string, tensor, u32, u64

NUM_FILES_PER_SEED = 250
MAX_SECONDS = 1.0
MAX_EXTRA_BYTES = 2**18
VALUE_BYTES = [1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8]  # by type id; strings and arrays apart
EXTREMES = [0, 1, 5, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**60, 2**63 - 1, 2**63, 2**64 - 1]


def originals() -> list[bytes]:
    """Small good files: all value types and block types, a vocabulary, an alignment of its own, and no tensors."""
    numbers = [kind for kind, num_bytes in enumerate(VALUE_BYTES) if num_bytes]
    values = [pair(f"number.{kind}", kind, bytes([1] * VALUE_BYTES[kind])) for kind in numbers]
    values += [pair(f"array.{kind}", ARRAY, array(kind, [bytes([1] * VALUE_BYTES[kind])] * 3)) for kind in numbers]
    nested = array(ARRAY, [array(STRING, [string("a"), string("é")]), array(ARRAY, [array(5, [bytes(4)] * 2)])])
    words = [pair("tokens", ARRAY, array(STRING, [string(f"<{i}>") for i in range(40)]))]
    words += [pair("text", STRING, string("naïve 分词 🙂")), pair("nested", ARRAY, nested)]

    tensors, blocks = [], b""
    for type_id, block_type in BLOCK_TYPES.items():
        num_values = max(block_type.values_per_block, 16)
        num_bytes = num_values // block_type.values_per_block * block_type.bytes_per_block
        tensors.append(tensor(block_type.name, [num_values, 2], type_id, len(blocks)))
        blocks += random.Random(type_id).randbytes(2 * num_bytes)
        blocks += bytes(-len(blocks) % 64)
    alignment = [pair("general.alignment", 4, u32(64))]
    return [
        gguf(values, tensors, blocks, version=u32(2)),
        gguf(words, tensors[:3], blocks, version=u32(3)),
        gguf([*alignment, *words], tensors, blocks, version=u32(3), alignment=64),
        gguf([*values, *words], version=u32(2)),
    ]


def flip_bits(chance: random.Random, content: bytearray, header: int) -> None:
    for _ in range(chance.randint(1, 8)):
        content[chance.randrange(header)] ^= 1 << chance.randrange(8)


def truncate(chance: random.Random, content: bytearray, header: int) -> None:
    del content[chance.randrange(len(content)) :]


def overwrite_integer(chance: random.Random, content: bytearray, header: int) -> None:
    """Where 8 bytes look like a length, a count or an offset, put one that is extreme or slightly off."""
    likely = [i for i in range(8, header - 8) if content[i] and not any(content[i + 2 : i + 8])]
    place = chance.choice(likely)
    nearby = [int.from_bytes(content[place : place + 8], "little") + step for step in (-1, 1, 32)]
    value = chance.choice([*EXTREMES, *nearby, len(content), len(content) - place])
    width = chance.choice([4, 8])
    content[place : place + width] = u64(value % 2**64)[:width]


def insert_integer(chance: random.Random, content: bytearray, header: int) -> None:
    place = chance.randrange(header)
    content[place:place] = u64(chance.choice(EXTREMES))[: chance.choice([1, 4, 8])]


def splice(chance: random.Random, content: bytearray, header: int) -> None:
    """Put a piece of some file in place of a piece of this one."""
    donor = chance.choice(originals())
    start, place = chance.randrange(len(donor)), chance.randrange(header)
    content[place : place + chance.randrange(64)] = donor[start : start + chance.randrange(64)]


MUTATIONS: list[Callable[[random.Random, bytearray, int], None]] = [
    flip_bits,
    truncate,
    overwrite_integer,
    insert_integer,
    splice,
]


def read_whole(path: Path) -> str:
    """Opens and reads everything within the bounds; returns "read", or what the file was refused for."""
    num_bytes = path.stat().st_size
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        file = open_gguf(path)
    except ClearheadError as error:
        return str(error).partition(": ")[2]
    finally:
        assert tracemalloc.get_traced_memory()[1] - before <= 2 * num_bytes + MAX_EXTRA_BYTES
    with file:
        assert sum(each.num_bytes for each in file.tensors.values()) <= num_bytes
        for name, each in file.tensors.items():
            values = file.read(name)
            assert values.shape == each.shape
            assert values.nbytes <= 13 * each.num_bytes
        for strings in file.metadata.values():
            if isinstance(strings, StringArray):
                assert len(list(strings)) == len(strings)
    return "read"


@pytest.mark.parametrize("seed", range(8))
def test_damaged_files_are_read_or_refused(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    path = tmp_path / "damaged.gguf"
    good = originals()
    outcomes: Counter[str] = Counter()
    tracemalloc.start()
    try:
        for _ in range(NUM_FILES_PER_SEED):
            content = bytearray(chance.choice(good))
            for mutate in chance.choices(MUTATIONS, k=chance.randint(1, 2)):
                mutate(chance, content, min(len(content), 1500))
            path.write_bytes(content)
            started = time.process_time()
            outcomes[read_whole(path)] += 1
            assert time.process_time() - started < MAX_SECONDS
    finally:
        tracemalloc.stop()
    assert NUM_FILES_PER_SEED // 20 < outcomes["read"] < NUM_FILES_PER_SEED // 2
    assert len(outcomes) > 50, "the damage is found in few places"


def test_undamaged_files_are_read(tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        for number, content in enumerate(originals()):
            path = tmp_path / f"{number}.gguf"
            path.write_bytes(content)
            assert read_whole(path) == "read"
    finally:
        tracemalloc.stop()
