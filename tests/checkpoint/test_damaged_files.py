"""Two thousand damaged files of 9 MB: each is read or rejected within seconds, using at most twice its size of memory.

They are read in another process (`python -m tests.checkpoint.test_damaged_files KIND FOLDER`), which resets the
kernel's record of its peak memory before every file. The damage is deterministic.
"""

import gc
import json
import os
import random
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import clearhead
from clearhead.checkpoint.gguf import open_gguf
from clearhead.checkpoint.gguf_blocks import BLOCK_TYPES
from clearhead.checkpoint.gguf_header import StringArray
from clearhead.checkpoint.huggingface import save_folder
from clearhead.errors import ClearheadError
from tests.checkpoint.gguf_files import ARRAY, STRING, array, gguf, pair, string, tensor, u32, u64
from tests.checkpoint.tiny import tiny_network

NUM_FILES = {"gguf model": 700, "gguf blocks": 600, "safetensors": 700}
MAX_RATIO, MAX_SECONDS = 2.0, 2.0
SIZES = {"width": 512, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "feed_forward": 1024}
EXTREMES = [0, 1, 5, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**60, 2**63 - 1, 2**63, 2**64 - 1]
VALUE_BYTES = [1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8]  # by type id; 0 for strings and arrays
RESET_PEAK = Path("/proc/self/clear_refs")


# --- a valid file of each kind; each function returns its path and the size of its header


def every_kind_of_value() -> list[bytes]:
    numbers = {kind: bytes([1] * num_bytes) for kind, num_bytes in enumerate(VALUE_BYTES) if num_bytes}
    nested = array(ARRAY, [array(STRING, [string("a"), string("é")]), array(ARRAY, [array(5, [bytes(4)] * 2)])])
    return [
        *(pair(f"number.{kind}", kind, value) for kind, value in numbers.items()),
        *(pair(f"array.{kind}", ARRAY, array(kind, [value] * 3)) for kind, value in numbers.items()),
        pair("nested", ARRAY, nested),
        pair("general.alignment", 4, u32(64)),
    ]


def write_gguf(path: Path, pairs: list[bytes], tensors: list[tuple[str, list[int], int, bytes]], version: int) -> int:
    described, blocks = [], bytearray()
    for name, dims, type_id, stored in tensors:
        described.append(tensor(name, dims, type_id, len(blocks)))
        blocks += stored + bytes(-len(stored) % 64)
    content = gguf(pairs, described, bytes(blocks), version=u32(version), alignment=64)
    path.write_bytes(content)
    return len(content) - len(blocks)


def write_gguf_model(folder: Path) -> tuple[Path, int]:
    """Write a model with matrices in bfloat16 and norms in float32."""
    named = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.chat_template": "{{ messages }}",
    }
    counted = {
        "context_length": 64,
        "embedding_length": SIZES["width"],
        "block_count": SIZES["num_layers"],
        "feed_forward_length": SIZES["feed_forward"],
        "attention.head_count": SIZES["num_heads"],
        "attention.head_count_kv": SIZES["num_kv_heads"],
    }
    words = [string(chr(letter)) for letter in range(33, 64)]
    pairs = [pair(key, STRING, string(value)) for key, value in named.items()]
    pairs += [pair(f"llama.{key}", 4, u32(value)) for key, value in counted.items()]
    pairs += [pair("llama.attention.layer_norm_rms_epsilon", 6, torch.tensor(1e-5).numpy().tobytes())]
    pairs += [pair("tokenizer.ggml.tokens", ARRAY, array(STRING, words))]
    pairs += [pair("tokenizer.ggml.merges", ARRAY, array(STRING, []))]
    pairs += [pair("tokenizer.ggml.eos_token_id", 4, u32(1)), *every_kind_of_value()]
    tensors = []
    for name, weight in tiny_network(**SIZES).state_dict().items():
        type_id, stored = (30, weight.bfloat16().view(torch.int16)) if weight.ndim == 2 else (0, weight)
        tensors.append((gguf_name(name), list(weight.shape)[::-1], type_id, stored.numpy().tobytes()))
    return folder / "model.gguf", write_gguf(folder / "model.gguf", pairs, tensors, version=3)


def gguf_name(own: str) -> str:
    theirs = {
        "decoder.embedding.tokens": "token_embd",
        "decoder.final_norm": "output_norm",
        "decoder.layers": "blk",
        "attention_residual.norm": "attn_norm",
        "feed_forward_residual.norm": "ffn_norm",
        "attention.query": "attn_q",
        "attention.key": "attn_k",
        "attention.value": "attn_v",
        "attention.output": "attn_output",
        "feed_forward.": "ffn_",
    }
    for ours, name in theirs.items():
        own = own.replace(ours, name)
    return own


def write_gguf_blocks(folder: Path) -> tuple[Path, int]:
    """Write tensors of all block types and a large table."""
    chance, tensors = random.Random(0), [("table", [1536, 1536], 0, bytes(4 * 1536**2))]
    for type_id, kind in BLOCK_TYPES.items():
        num_blocks = 2 * max(1, 16 // kind.values_per_block)
        dims = [num_blocks // 2 * kind.values_per_block, 2]
        tensors.append((kind.name, dims, type_id, chance.randbytes(num_blocks * kind.bytes_per_block)))
    return folder / "model.gguf", write_gguf(folder / "model.gguf", every_kind_of_value(), tensors, version=2)


def write_safetensors(folder: Path) -> tuple[Path, int]:
    """Write a model; spaces after the header leave space for longer numbers in it."""
    save_folder(tiny_network(**SIZES).bfloat16(), folder)
    path = folder / "model.safetensors"
    padding = 64
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    path.write_bytes(u64(length + padding) + content[8 : 8 + length] + b" " * padding + content[8 + length :])
    return path, 8 + length + padding


# --- reading


def load_model(path: Path) -> object:
    return clearhead.load(path if path.suffix == ".gguf" else path.parent, fast=False)


def read_blocks(path: Path) -> None:
    file = open_gguf(path)
    for name, described in file.tensors.items():
        assert file.read(name).shape == described.shape
    for strings in file.metadata.values():
        if isinstance(strings, StringArray):
            assert len(list(strings)) == len(strings)


# --- damage


def put_number(chance: random.Random, header: bytearray) -> None:
    """Replace bytes that look like a count, a length or an offset by an extreme or a slightly different number."""
    place = chance.choice([i for i in range(len(header) - 8) if header[i] and not any(header[i + 2 : i + 4])])
    found = int.from_bytes(header[place : place + 8], "little")
    value = chance.choice([*EXTREMES, found - 1, found + 1, found + 64, found * 1000])
    width = chance.choice([4, 8])
    header[place : place + width] = u64(value % 2**64)[:width]


def put_digits(chance: random.Random, header: bytearray) -> None:
    """Replace a number that is stored as text, or the length of the header before it."""
    found = chance.choice([*re.finditer(rb"\d+", header[8:]), None])
    if found is None:
        return put_number(chance, header)
    value = chance.choice([*EXTREMES, -1, int(found[0]) - 1, int(found[0]) + 1, int(found[0]) * 1000])
    header[8 + found.start() : 8 + found.end()] = str(value).encode()
    return None


def flip_bits(chance: random.Random, header: bytearray) -> None:
    for _ in range(chance.randint(1, 8)):
        header[chance.randrange(len(header))] ^= 1 << chance.randrange(8)


def splice(chance: random.Random, header: bytearray) -> None:
    """Replace a piece of the header by another piece, or by a number."""
    start, place = chance.randrange(len(header)), chance.randrange(len(header))
    piece = chance.choice([header[start : start + chance.randrange(64)], u64(chance.choice(EXTREMES))])
    header[place : place + chance.randrange(64)] = piece


@dataclass(frozen=True)
class Kind:
    write: Callable[[Path], tuple[Path, int]]
    read: Callable[[Path], object]
    put: Callable[[random.Random, bytearray], None]

    def damage(self, chance: random.Random, good: bytes, header_bytes: int) -> tuple[int, bytes | None]:
        """Return an offset and the bytes to write there; None: the file is truncated there."""
        match chance.randrange(8):
            case 0:
                return chance.randrange(chance.choice([header_bytes, len(good)])), None
            case 1:
                place = chance.randrange(header_bytes, len(good))
                return place, bytes([good[place] ^ 1 << chance.randrange(8)])
        header = bytearray(good[:header_bytes])
        for change in chance.choices([self.put, flip_bits, splice], weights=[2, 1, 1], k=chance.randint(1, 2)):
            change(chance, header)
        return 0, bytes(header[:header_bytes].ljust(header_bytes))


KINDS = {
    "gguf model": Kind(write_gguf_model, load_model, put_number),
    "gguf blocks": Kind(write_gguf_blocks, read_blocks, put_number),
    "safetensors": Kind(write_safetensors, load_model, put_digits),
}


# --- the process that reads, and the test that starts it


def in_bytes(line: str) -> int:
    """Return a line of /proc/self/status in bytes."""
    found = re.search(rf"{line}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def outcome(kind: Kind, path: Path) -> str:
    """Return "read", or the error message without its numbers and quoted values."""
    try:
        kind.read(path)
    except ClearheadError as error:
        return re.sub(r"\d+|(['\"]).*?\1", "", str(error).replace(str(path.parent), ""))
    return "read"


def main(kind: Kind, folder: Path, num_files: int) -> None:
    """Print for every file: growth of resident memory divided by the file's size, seconds, and the outcome."""
    read_blocks(write_gguf_blocks(folder)[0])  # damage may ask for a format whose tables are in the gguf package
    path, header_bytes = kind.write(folder)
    good = path.read_bytes()
    for _ in range(2):  # libraries allocate memory of their own at first use
        assert outcome(kind, path) == "read"
    gc.collect()
    gc.freeze()
    floor, size = in_bytes("VmRSS"), in_bytes("VmSize")
    # Resident memory excludes allocations that are never touched, so these are limited, too.
    resource.setrlimit(resource.RLIMIT_AS, (size + 4 * len(good), resource.RLIM_INFINITY))
    with path.open("r+b", buffering=0) as file:
        for number in range(num_files + 1):
            offset, changed = kind.damage(random.Random(number), good, header_bytes) if number else (0, b"")
            file.truncate(offset) if changed is None else os.pwrite(file.fileno(), changed, offset)
            RESET_PEAK.write_text("5")
            started = time.process_time()
            result = outcome(kind, path)
            seconds = time.process_time() - started
            print(json.dumps([(in_bytes("VmHWM") - floor) / len(good), seconds, result]))
            gc.collect()  # a model has reference cycles and may map the file, which changes now
            end = len(good) if changed is None else offset + len(changed)
            os.pwrite(file.fileno(), good[offset:end], offset)  # a variable would keep this copy while the next is read


@pytest.mark.skipif(not RESET_PEAK.exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("name", KINDS)
def test_damaged_files_are_read_or_rejected_within_twice_their_size(tmp_path, name):
    command = [sys.executable, "-m", __name__, name, str(tmp_path)]
    # Freed memory is returned at once, so that it cannot hide what the next file needs.
    allocator = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    environment = os.environ | allocator | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    ratios, seconds, outcomes = zip(*rows, strict=True)
    assert len(rows) == NUM_FILES[name] + 1
    assert outcomes[0] == "read", "the first file is undamaged"
    assert ratios[0] > 0.5, "reading an undamaged file must be visible in this measurement"
    # A bfloat16 file of which one tensor is said to be quantized becomes a float32 model, converted tensor by tensor.
    max_ratio = MAX_RATIO + 0.2 if name == "gguf model" else MAX_RATIO
    assert max(ratios) <= max_ratio, f"damage {ratios.index(max(ratios))}"
    assert max(seconds) <= MAX_SECONDS, f"damage {seconds.index(max(seconds))}"
    assert NUM_FILES[name] / 50 < outcomes.count("read") < NUM_FILES[name] / 2
    assert len(set(outcomes)) > 25, "the damage is detected in too few places"


if __name__ == "__main__":
    main(KINDS[sys.argv[1]], Path(sys.argv[2]), NUM_FILES[sys.argv[1]])
