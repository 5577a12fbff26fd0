"""Damaged files of 20 MB: whatever they claim, reading them never takes more than twice their size.

They are read in another process (`python -m tests.checkpoint.test_damaged_memory KIND FOLDER`), which sets back the
kernel's high-water mark of its resident memory before every file.
"""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from clearhead.checkpoint.gguf import open_gguf
from clearhead.checkpoint.huggingface import load_folder, save_folder
from clearhead.errors import ClearheadError
from clearhead.model.transformer import Transformer
from tests.checkpoint.gguf_files import gguf, pair, tensor, u32, u64
from tests.checkpoint.tiny import tiny_config

NUM_FILES = 30
LARGEST_RATIO = 2.0
SETBACK = Path("/proc/self/clear_refs")
EXTREMES = [b"0", b"1", b"99999999", b"4294967295", b"9223372036854775807", b"18446744073709551615"]


def resident_bytes(which: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(which))


# --- a good file of each kind, and how it is read


def write_safetensors(folder: Path) -> Path:
    sizes = {"width": 384, "num_layers": 4, "num_heads": 6, "feed_forward": 768, "vocab_size": 2048}
    save_folder(Transformer(tiny_config(**sizes)), folder)
    return folder / "model.safetensors"


def write_gguf(folder: Path) -> Path:
    folder.mkdir()
    num_tensors, num_values = 20, 2**18
    tensors = [tensor(f"w{i}", [512, 512], 0, offset=4 * num_values * i) for i in range(num_tensors)]
    path = folder / "model.gguf"
    path.write_bytes(gguf([pair("number", 4, u32(7))], tensors, bytes(4 * num_values * num_tensors)))
    return path


def read_safetensors(path: Path) -> object:
    return load_folder(path.parent)


def read_gguf(path: Path) -> object:
    with open_gguf(path) as file:
        return [file.read(name) for name in file.tensors]


WRITE = {"safetensors": write_safetensors, "gguf": write_gguf}
READ = {"safetensors": read_safetensors, "gguf": read_gguf}


# --- damage


def damage_safetensors(chance: random.Random, content: bytearray) -> None:
    """Numbers of the header put to extremes, its length made wrong, a flipped bit, a lost end."""
    length = int.from_bytes(content[:8], "little")
    match chance.randrange(4):
        case 0:
            header = json.loads(content[8 : 8 + length])
            entry = header[chance.choice([name for name in header if name != "__metadata__"])]
            numbers = entry[chance.choice(["shape", "data_offsets"])]
            numbers[chance.randrange(len(numbers))] = int(chance.choice(EXTREMES))
            changed = json.dumps(header).encode()
            content[: 8 + length] = u64(len(changed)) + changed
        case 1:
            content[:8] = u64(chance.choice([0, 1, length - 1, length * 1000, 2**40, 2**63, 2**64 - 1]))
        case 2:
            content[chance.randrange(chance.choice([8 + length, len(content)]))] ^= 1 << chance.randrange(8)
        case 3:
            del content[chance.randrange(len(content)) :]


def damage_gguf(chance: random.Random, content: bytearray) -> None:
    header = 1000
    match chance.randrange(3):
        case 0:
            place = chance.randrange(8, header)
            content[place : place + 8] = u64(int(chance.choice(EXTREMES)))
        case 1:
            content[chance.randrange(header)] ^= 1 << chance.randrange(8)
        case 2:
            del content[chance.randrange(len(content)) :]


DAMAGE = {"safetensors": damage_safetensors, "gguf": damage_gguf}


# --- the process that reads, and the test that looks at it


def main(kind: str, folder: Path) -> None:
    """Prints for every file by how many times its size resident memory grew, and what became of it."""
    READ[kind](WRITE[kind](folder / "warm"))  # what libraries allocate at first use
    path, chance = WRITE[kind](folder / "damaged"), random.Random(0)
    good = path.read_bytes()
    for number in range(NUM_FILES):
        content = bytearray(good)
        if number:  # the first is whole
            DAMAGE[kind](chance, content)
        path.write_bytes(content)
        del content
        SETBACK.write_text("5")
        before, outcome = resident_bytes("VmRSS"), "read"
        try:
            READ[kind](path)
        except ClearheadError:
            outcome = "refused"
        print((resident_bytes("VmHWM") - before) / len(good), outcome)


@pytest.mark.skipif(not SETBACK.exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_memory_stays_below_twice_the_file(tmp_path, kind):
    command = [sys.executable, "-m", __name__, kind, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    rows = [line.split() for line in done.stdout.splitlines()]
    ratios = [float(ratio) for ratio, _ in rows]
    assert rows[0][1] == "read"
    assert ratios[0] > 0.5, "reading a whole file must show in this measure"
    assert sum(outcome == "refused" for _, outcome in rows) >= NUM_FILES / 2
    assert max(ratios) <= LARGEST_RATIO


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
