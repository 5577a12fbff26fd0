"""GGUF files: equal to the gguf package for valid files, one clear error for invalid ones."""

import time
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from clearhead.checkpoint.gguf import GgufFile, open_gguf
from clearhead.checkpoint.gguf_blocks import BLOCK_TYPES
from clearhead.checkpoint.gguf_header import MAX_COUNT, GgufValue, StringArray
from clearhead.errors import ClearheadError
from tests.checkpoint.gguf_files import ARRAY, STRING, array, pair, string, tensor, u32, u64
from tests.checkpoint.gguf_files import gguf as gguf_bytes

VALUES: dict[str, tuple[Any, gguf.GGUFValueType]] = {
    "uint8": (255, gguf.GGUFValueType.UINT8),
    "int8": (-128, gguf.GGUFValueType.INT8),
    "uint16": (65535, gguf.GGUFValueType.UINT16),
    "int16": (-32768, gguf.GGUFValueType.INT16),
    "uint32": (2**32 - 1, gguf.GGUFValueType.UINT32),
    "int32": (-(2**31), gguf.GGUFValueType.INT32),
    "uint64": (2**64 - 1, gguf.GGUFValueType.UINT64),
    "int64": (-(2**63), gguf.GGUFValueType.INT64),
    "float32": (0.5, gguf.GGUFValueType.FLOAT32),
    "float64": (0.1, gguf.GGUFValueType.FLOAT64),
    "true": (True, gguf.GGUFValueType.BOOL),
    "false": (False, gguf.GGUFValueType.BOOL),
    "string": ("naïve 分词 🙂", gguf.GGUFValueType.STRING),
    "strings": (["<s>", "", "é", "分", "🙂"], gguf.GGUFValueType.ARRAY),
    "integers": ([1, -2, 3], gguf.GGUFValueType.ARRAY),
    "floats": ([0.5, -1.25], gguf.GGUFValueType.ARRAY),
    "bools": ([True, False, True], gguf.GGUFValueType.ARRAY),
    "nested": ([[1, 2], [3], [4, 5, 6]], gguf.GGUFValueType.ARRAY),
    "nested strings": ([["a", "bc"], ["d"]], gguf.GGUFValueType.ARRAY),
}


def write_with_gguf_package(path: Path, alignment: int | None = None) -> dict[str, np.ndarray]:
    """Write one value of each type and one tensor of each block type; return the tensors' values."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, (value, value_type) in VALUES.items():
        writer.add_key_value(key, value, value_type)
    if alignment:
        writer.add_custom_alignment(alignment)
    generator = np.random.default_rng(0)
    expected = {}
    for type_id, block_type in BLOCK_TYPES.items():
        if block_type.name == "Q1_0":  # the gguf package does not dequantize it
            continue
        kind = gguf.GGMLQuantizationType(type_id)
        num_bytes = 512 // block_type.values_per_block * block_type.bytes_per_block
        blocks = generator.integers(0, 64, (2, 3, num_bytes), dtype=np.uint8)
        writer.add_tensor(block_type.name, blocks, raw_dtype=kind)
        expected[block_type.name] = np.ascontiguousarray(gguf.quants.dequantize(blocks, kind), dtype=np.float32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def plain(value: GgufValue) -> Any:
    """Return a value as Python numbers, strings and lists."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, StringArray):
        return list(value)
    return [plain(each) for each in value] if isinstance(value, list) else value


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "small.gguf"


def write_and_open(path: Path, content: bytes | bytearray) -> GgufFile:
    path.write_bytes(content)
    return open_gguf(path)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [None, 8, 256])
def test_all_values_and_tensors_of_a_file_are_read(path: Path, version: int, alignment: int | None) -> None:
    expected = write_with_gguf_package(path, alignment)
    content = bytearray(path.read_bytes())
    content[4] = version  # little-endian files of versions 2 and 3 differ in nothing else
    file = write_and_open(path, content)
    assert file.version == version
    for key, (value, _) in VALUES.items():
        assert plain(file.metadata[key]) == value
        assert type(plain(file.metadata[key])) is type(value)
    assert list(file.tensors) == list(expected)
    for name, values in expected.items():
        actual = file.read(name)
        assert actual.shape == (2, 3, 512) == file.tensors[name].shape
        assert actual.dtype == {"F16": torch.float16, "BF16": torch.bfloat16}.get(name, torch.float32)
        np.testing.assert_array_equal(actual.float().numpy().view(np.uint32), values.view(np.uint32))


def test_a_shape_is_the_reverse_of_the_stored_dims(path: Path) -> None:
    values = np.arange(24, dtype=np.float32)
    content = gguf_bytes((), [tensor("w", [4, 3, 2], 0, 0)], values.tobytes())
    assert torch.equal(write_and_open(path, content).read("w"), torch.arange(24.0).reshape(2, 3, 4))


def test_read_blocks_returns_the_stored_bytes(path: Path) -> None:
    stored = np.arange(36, dtype=np.uint8)
    content = gguf_bytes((), [tensor("w", [64], 2, 0)], stored.tobytes())
    file = write_and_open(path, content)
    np.testing.assert_array_equal(file.read_blocks("w"), stored.reshape(2, 18))
    path.write_bytes(content[:-1])
    with pytest.raises(ClearheadError, match=r"small\.gguf has become shorter"):
        file.read("w")


def test_the_error_for_an_unknown_tensor_suggests_the_nearest_name(path: Path) -> None:
    content = gguf_bytes((), [tensor("output.weight", [1], 0, 0)], bytes(4))
    with pytest.raises(ClearheadError, match=r"did you mean 'output\.weight'"):
        write_and_open(path, content).read("output.wieght")


def test_a_file_without_metadata_and_tensors(path: Path) -> None:
    file = write_and_open(path, gguf_bytes(alignment=1))
    assert (file.metadata, file.tensors) == ({}, {})


def test_empty_arrays(path: Path) -> None:
    pairs = [pair(str(kind), ARRAY, array(kind, [])) for kind in range(13)]
    file = write_and_open(path, gguf_bytes(pairs))
    assert [plain(value) for value in file.metadata.values()] == [[]] * 13


def test_a_string_array_is_indexed_like_a_list(path: Path) -> None:
    words = ["<s>", "", "分词", "🙂"]
    content = gguf_bytes([pair("a", ARRAY, array(STRING, [string(word) for word in words]))])
    strings = write_and_open(path, content).metadata["a"]
    assert isinstance(strings, StringArray)
    assert len(strings) == 4
    assert [strings[i] for i in range(-4, 4)] == words * 2
    with pytest.raises(IndexError):
        strings[4]


def one_pair(value_type: int, value: bytes) -> bytes:
    return gguf_bytes([pair("a", value_type, value)], alignment=1)


def one_tensor(dims: list[int], block_type: int = 0, offset: int = 0, num_dims: int | None = None) -> bytes:
    return gguf_bytes((), [tensor("w", dims, block_type, offset, num_dims)], bytes(256))


def two_tensors(*offsets: int, names: str = "vw") -> bytes:
    infos = [tensor(name, [16], 0, offset) for name, offset in zip(names, offsets, strict=True)]
    return gguf_bytes((), infos, bytes(256))


def nested(depth: int) -> bytes:
    return array(0, []) if depth == 1 else array(ARRAY, [nested(depth - 1)])


def aligned(alignment: int) -> bytes:
    return gguf_bytes([pair("general.alignment", 4, u32(alignment))])


HUGE = 2**64 - 1
INVALID_FILES = {
    "magic": (b"GGML" + bytes(20), "it begins with b'GGML' instead of b'GGUF'"),
    "cut in the magic": (b"GG", "opening, byte 0: magic: at least 4 bytes are expected, but 2 are left"),
    "cut in the counts": (gguf_bytes(alignment=1)[:-1], "opening, byte 16: number of metadata pairs"),
    "version 1": (gguf_bytes(version=u32(1)), "GGUF version 1; only little-endian versions 2 and 3"),
    "version 4": (gguf_bytes(version=u32(4)), "GGUF version 4; only"),
    "big-endian": (gguf_bytes(version=u32(3)[::-1]), "GGUF big-endian version 3; only"),
    "too many pairs": (gguf_bytes(num_pairs=HUGE), f"at most {MAX_COUNT} of each"),
    "too many tensors": (gguf_bytes(num_tensors=HUGE), f"at most {MAX_COUNT} of each"),
    "more pairs than bytes": (gguf_bytes(num_pairs=5), "0 tensors and 5 metadata pairs: at least 70 bytes"),
    "more tensors than bytes": (gguf_bytes(num_tensors=2), "2 tensors and 0 metadata pairs: at least 66 bytes"),
    "long key": (gguf_bytes([u64(2**20) + bytes(8)]), "metadata 0, byte 32: string: at least 1048576 bytes"),
    "huge key": (gguf_bytes([u64(HUGE) + bytes(8)]), f"a string has {HUGE} bytes; at most"),
    "empty key": (gguf_bytes([pair("", 0, b"\0")]), "metadata 0, byte 32: the name is empty"),
    "key twice": (gguf_bytes([pair("a", 0, b"\0")] * 2), "metadata 1, byte 46: 'a' occurs twice"),
    "key not UTF-8": (gguf_bytes([pair(b"ab\xff", 0, b"\0")]), "metadata 0, byte 34: the string is not UTF-8"),
    "value type": (one_pair(13, bytes(8)), "metadata 'a', byte 33: unknown value type 13; types are 0 to 12"),
    "element type": (one_pair(ARRAY, array(13, [])), "unknown value type 13"),
    "cut value": (
        one_pair(10, bytes(7)),
        "metadata 'a', byte 37: 1 values of uint64: at least 8 bytes are expected, but 7",
    ),
    "bool": (one_pair(7, b"\2"), "a bool is stored as 2"),
    "bool in an array": (one_pair(ARRAY, array(7, [b"\1\0\3"], 3)), "a bool is stored as 3"),
    "cut string": (one_pair(STRING, u64(9) + bytes(8)), "string: at least 9 bytes are expected, but 8 are left"),
    "string not UTF-8": (one_pair(STRING, string(b"a\xed\xa0\x80")), "byte 46: the string is not UTF-8"),
    "huge array": (one_pair(ARRAY, array(4, [], HUGE)), f"{HUGE} values of uint32: at least {4 * HUGE} bytes"),
    "huge strings": (one_pair(ARRAY, array(STRING, [bytes(8)], 2)), "2 strings: at least 16 bytes are expected, but 8"),
    "string in an array": (one_pair(ARRAY, array(STRING, [u64(HUGE)])), f"a string has {HUGE} bytes"),
    "huge arrays": (one_pair(ARRAY, array(ARRAY, [bytes(12)], 2)), "2 arrays: at least 24 bytes are expected, but 12"),
    "deep array": (one_pair(ARRAY, nested(5)), "nested at most 4 deep"),
    "many arrays": (one_pair(ARRAY, array(ARRAY, [nested(1)] * MAX_COUNT)), f"at most {MAX_COUNT} arrays"),
    "alignment 0": (aligned(0), "metadata 'general.alignment', byte 53: 0 is not a power of two from 8"),
    "alignment 24": (aligned(24), "24 is not a power of two"),
    "alignment huge": (aligned(2**31), "2147483648 is not a power of two"),
    "alignment text": (gguf_bytes([pair("general.alignment", STRING, string("8"))]), "'8' is not a power of two"),
    "no dims": (one_tensor([]), "tensor 'w', byte 33: the tensor has 0 dimensions; 1 to 4"),
    "five dims": (one_tensor([1] * 5), "5 dimensions; 1 to 4"),
    "huge dims": (one_tensor([], num_dims=2**32 - 1), "4294967295 dimensions"),
    "zero dim": (one_tensor([4, 0]), "the shape is (0, 4); no dimension may be 0"),
    "overflowing dims": (one_tensor([2**32, 2**32]), f"its {4 * 2**64} bytes go beyond the end"),
    "overflowing dims of blocks": (one_tensor([2**63, 2], 2), f"its {2**64 // 32 * 18} bytes go beyond"),
    "part of a block": (one_tensor([48, 2], 2), "the last must be a multiple of 32, the size of a Q4_0 block"),
    "blocks across rows": (one_tensor([128, 2], 12), "the last must be a multiple of 256, the size of a Q4_K block"),
    "block type": (
        one_tensor([32], 4),
        "block type 4 cannot be read; the supported types are F32 (0), F16 (1), Q4_0 (2)",
    ),
    "unaligned": (one_tensor([4], offset=16), "offset 16 is not a multiple of the alignment, 32"),
    "beyond the end": (one_tensor([65]), "tensor 'w', byte 64: its 260 bytes go beyond the end of the file, byte 320"),
    "far beyond the end": (one_tensor([1], offset=2**64 - 32), "go beyond the end of the file"),
    "overlap": (two_tensors(0, 32), "its blocks overlap those of 'v', which end at byte"),
    "same place": (two_tensors(64, 64), "overlap"),
    "tensor twice": (two_tensors(0, 64, names="vv"), "tensor 1, byte 65: 'v' occurs twice"),
    "tensor without a name": (
        gguf_bytes((), [tensor("", [1], 0, 0)], bytes(9)),
        "tensor 0, byte 32: the name is empty",
    ),
}


@pytest.mark.parametrize("name", INVALID_FILES)
def test_the_error_for_an_invalid_file_is_one_line(path: Path, name: str) -> None:
    content, message = INVALID_FILES[name]
    with pytest.raises(ClearheadError) as raised:
        write_and_open(path, content)
    assert message in str(raised.value)
    assert str(raised.value).startswith((f"{path}, ", f"{path} is not a GGUF file"))
    assert "\n" not in str(raised.value)


def test_a_missing_or_empty_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    for path in (tmp_path, tmp_path / "missing.gguf", tmp_path / "empty.gguf"):
        with pytest.raises(ClearheadError, match="is not a file, or is empty"):
            open_gguf(path)


@pytest.mark.parametrize("padding", [0, 12, 1000])
def test_an_array_with_a_huge_count_is_rejected_at_once(path: Path, padding: int) -> None:
    path.write_bytes(one_pair(ARRAY, array(ARRAY, [bytes(padding)], 2**60)))
    started = time.process_time()
    with pytest.raises(ClearheadError, match=f"metadata 'a', byte 41: {2**60} arrays"):
        open_gguf(path)
    assert time.process_time() - started < 5  # reading on would take ages; the rest is room for the garbage collector


def test_every_truncated_file_is_rejected(path: Path) -> None:
    content = gguf_bytes([pair("a", ARRAY, array(STRING, [string("b")]))], [tensor("w", [2], 0, 0)], bytes(8))
    for num_bytes in range(1, len(content)):
        with pytest.raises(ClearheadError, match=r"at least|beyond the end"):
            write_and_open(path, content[:num_bytes])
    assert write_and_open(path, content).read("w").tolist() == [0, 0]


def test_a_vocabulary_of_150_000_tokens_opens_in_half_a_second(path: Path) -> None:
    words = [f"token {i}" for i in range(150_000)]
    path.write_bytes(gguf_bytes([pair("tokens", ARRAY, array(STRING, [string(word) for word in words]))]))
    seconds = []
    for _ in range(3):  # the garbage collector may need as long in one of them
        started = time.process_time()
        file = open_gguf(path)
        seconds.append(time.process_time() - started)
    assert min(seconds) < 0.5
    assert plain(file.metadata["tokens"]) == words


NAMES = [f"{i:04x}" for i in range(MAX_COUNT)]
SMALL_TENSORS = [tensor(name, [1, 1, 1, 1], 0, 32 * i) for i, name in enumerate(NAMES)]
LARGE_FILES = {
    "empty strings": lambda: one_pair(ARRAY, array(STRING, [bytes(8 * 200_000)], 200_000)),
    "short strings": lambda: one_pair(ARRAY, array(STRING, [string("ab") * 200_000], 200_000)),
    "bytes": lambda: one_pair(ARRAY, array(0, [bytes(2**22)], 2**22)),
    "bools": lambda: one_pair(ARRAY, array(7, [bytes(2**22)], 2**22)),
    "wide strings": lambda: one_pair(ARRAY, array(STRING, [string("a" * 2**19 + "🙂")] * 8)),
    "empty arrays": lambda: one_pair(ARRAY, array(ARRAY, [array(STRING, [])] * (MAX_COUNT - 1))),
    "wide text": lambda: gguf_bytes([pair(str(i), STRING, string("a" * 2**19 + "🙂")) for i in range(20)]),
    "pairs and tensors": lambda: gguf_bytes(
        [pair(name, ARRAY, array(STRING, [])) for name in NAMES], SMALL_TENSORS, bytes(32 * MAX_COUNT)
    ),
}


@pytest.mark.parametrize("name", LARGE_FILES)
def test_opening_allocates_at_most_twice_the_file_and_32_mebibytes(path: Path, name: str) -> None:
    content = LARGE_FILES[name]()
    tracemalloc.start()
    try:
        file: GgufFile | None = write_and_open(path, content)
    except ClearheadError:
        file = None
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (file is None) == (name == "wide text")
    num_extra_bytes = 2**16 if "strings" in name or name in ("bytes", "bools") else 2**25
    assert peak <= 2 * len(content) + num_extra_bytes


def test_smollm2_equals_the_gguf_package(smollm2_gguf: Path) -> None:
    expected = gguf.GGUFReader(smollm2_gguf)
    file = open_gguf(smollm2_gguf)
    metadata = {key: plain(value) for key, value in file.metadata.items()}
    fields = {key: field.contents() for key, field in expected.fields.items()}
    assert metadata == {key: value for key, value in fields.items() if not key.startswith("GGUF.")}
    assert list(file.tensors) == [each.name for each in expected.tensors]
    for each in expected.tensors:
        values = gguf.quants.dequantize(each.data, each.tensor_type)
        assert file.tensors[each.name].offset == each.data_offset
        assert file.read_blocks(each.name).tobytes() == each.data.tobytes()
        np.testing.assert_array_equal(file.read(each.name).numpy().view(np.uint32), values.view(np.uint32))
