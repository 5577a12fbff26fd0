"""Memory of loading: at its peak the final weights and one tensor, in whatever form they are kept; then the weights.

Each model is loaded in a process of its own, a fork of one that has imported everything. The kernel records the peak of
its resident memory, which is set back before loading.
"""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from clearhead.checkpoint.huggingface import save_folder
from clearhead.model.transformer import Transformer
from tests.checkpoint.test_gguf_model import write_file
from tests.checkpoint.tiny import tiny_config

RESET_PEAK = Path("/proc/self/clear_refs")
SCRIPT = """
import json, os, re, sys, torch
from pathlib import Path
from clearhead.checkpoint import LoadOptions, open_model

def status_bytes(line):
    return 1024 * int(re.search(rf"{line}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

def observe(name, num_done, num_total):
    global peak_anonymous
    peak_anonymous = max(peak_anonymous, status_bytes("RssAnon") - anonymous_before)

def measure(warm_up, model, dtype, weights):
    global peak_anonymous, anonymous_before
    options = LoadOptions(dtype=getattr(torch, dtype), weights=weights, progress=observe)
    peak_anonymous = anonymous_before = 0
    open_model(warm_up, options)  # libraries allocate memory of their own at first use
    peak_anonymous, anonymous_before, before = 0, status_bytes("RssAnon"), status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # sets the recorded peak to the current value
    network = open_model(model, options).network
    peak = status_bytes("VmHWM") - before
    tensors = [*network.parameters(), *network.buffers()]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return [peak, peak_anonymous, size, status_bytes("VmRSS") - before]

for line in sys.stdin:
    if os.fork() == 0:
        print(json.dumps(measure(*json.loads(line))), flush=True)
        os._exit(0)
    if status := os.wait()[1]:
        print(json.dumps(f"the process ended with status {status}"), flush=True)
"""
# Freed memory is returned at once, so the allocator's reserve is not measured.
TRIMMED = {"MALLOC_TRIM_THRESHOLD_": "65536"}
SLACK = 6e6  # Python objects, and pages that the allocator cannot return
WIDTH, LAYERS, HEADS, INNER, VOCAB = 1024, 3, 8, 3072, 8192
LARGEST = VOCAB * WIDTH  # values of the largest tensor
BYTES_PER_VALUE = {"stored": 20 / 32, "int8": 34 / 32, "int4": 20 / 32, "full": 2}

pytestmark = pytest.mark.skipif(not RESET_PEAK.exists(), reason="reads Linux's /proc")


@contextlib.contextmanager
def measured_loading(allocator):
    """Yield a function that loads a model in a new process with these settings of the allocator.

    It returns the peak memory, that without mapped files, the size of the weights, and the memory after loading.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | allocator
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", SCRIPT], env=environment, **pipes) as process:

        def measure(warm_up, model, dtype="bfloat16", weights="full"):
            process.stdin.write(json.dumps([str(warm_up), str(model), dtype, weights]) + "\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
            assert not isinstance(answer, str), answer
            return answer

        yield measure
        process.stdin.close()


@pytest.fixture(scope="module")
def measure():
    with measured_loading(TRIMMED) as measure:
        yield measure


@pytest.fixture(scope="module")
def measure_untrimmed():
    with measured_loading({}) as measure:
        yield measure


def write_large_gguf(path):
    """Write a LLaMA with random Q4_1 blocks, 30 MB."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    shapes = {"token_embd.weight": (VOCAB, WIDTH), "output_norm.weight": (WIDTH,)}
    for layer in range(LAYERS):
        block = {f"attn_{part}.weight": (WIDTH, WIDTH) for part in ("q", "k", "v", "output")}
        block |= {"ffn_gate.weight": (INNER, WIDTH), "ffn_up.weight": (INNER, WIDTH), "ffn_down.weight": (WIDTH, INNER)}
        block |= {"attn_norm.weight": (WIDTH,), "ffn_norm.weight": (WIDTH,)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    generator = np.random.default_rng(0)
    for name, shape in shapes.items():
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, dtype=np.float32))
            continue
        blocks = generator.integers(0, 256, (shape[0], shape[1] // 32, 20), dtype=np.uint8)
        blocks[..., [1, 3]] &= 0b10111111  # keeps scale and minimum finite
        writer.add_tensor(name, blocks.reshape(shape[0], -1), raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def gguf_files(tmp_path_factory):
    """A tiny and a large GGUF file."""
    folder = tmp_path_factory.mktemp("gguf")
    write_large_gguf(folder / "large.gguf")
    return write_file(folder / "tiny.gguf", "llama"), folder / "large.gguf"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_hugging_face_folder_takes_its_weights_and_one_tensor(tmp_path, dtype, measure):
    """The mapped pages of the safetensors file do not count: the kernel can drop them."""
    save_folder(Transformer(tiny_config()), tmp_path / "tiny")
    sizes = {"width": 512, "num_layers": 12, "num_heads": 8, "feed_forward": 1536, "vocab_size": 8192}
    save_folder(Transformer(tiny_config(**sizes)), tmp_path / "large")
    _, peak, size, _ = measure(tmp_path / "tiny", tmp_path / "large", dtype)
    assert size > 80e6
    assert peak <= size + 4 * 8192 * 512 + SLACK, f"peak {peak / 1e6:.0f} MB for weights of {size / 1e6:.0f} MB"


@pytest.mark.parametrize(
    ("weights", "largest_bytes"),
    [
        ("stored", BYTES_PER_VALUE["stored"] * LARGEST),  # the blocks of one tensor, which are never dequantized
        ("int8", 4 * LARGEST),  # one tensor in float32
        ("int4", 4 * LARGEST),
        ("full", 4 * LARGEST),
    ],
)
def test_a_gguf_file_takes_its_weights_and_one_tensor(gguf_files, weights, largest_bytes, measure):
    """Full weights in bfloat16 take 97 MB alone, and in float32 twice that."""
    peak, _, size, _ = measure(*gguf_files, weights=weights)
    num_values = VOCAB * WIDTH + LAYERS * (4 * WIDTH**2 + 3 * WIDTH * INNER)
    # In 4 bits, token table, values and down projections keep 8.
    num_sensitive = VOCAB * WIDTH + LAYERS * (WIDTH**2 + WIDTH * INNER) if weights == "int4" else 0
    expected = (num_values - num_sensitive) * BYTES_PER_VALUE[weights] + num_sensitive * BYTES_PER_VALUE["int8"]
    assert size == pytest.approx(expected, rel=0.01)
    assert peak <= size + largest_bytes + SLACK, f"peak {peak / 1e6:.0f} MB for weights of {size / 1e6:.0f} MB"


@pytest.mark.parametrize("weights", ["stored", "int8", "int4", "full"])
def test_only_the_weights_stay_in_memory(gguf_files, weights, measure_untrimmed):
    """The allocator has its default settings, with which it keeps what is freed: 50 MB and more for this model."""
    _, _, size, resident = measure_untrimmed(*gguf_files, weights=weights)
    assert resident <= size + 2 * SLACK, f"{resident / 1e6:.0f} MB for weights of {size / 1e6:.0f} MB"
