"""Loading streams: at no moment is there more than the weights and one tensor."""

import subprocess
import sys
from pathlib import Path

import pytest

from clearhead.checkpoint.huggingface import save_folder
from clearhead.model.transformer import Transformer
from tests.checkpoint.tiny import tiny_config

SCRIPT = """
import sys, torch
from pathlib import Path
from clearhead.checkpoint.huggingface import load_folder

def anonymous_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

folder, dtype = Path(sys.argv[1]), getattr(torch, sys.argv[2])
load_folder(folder / "tiny")  # what torch itself allocates at first use
before, peak = anonymous_bytes(), 0
def watch(name, done, total):
    global peak
    peak = max(peak, anonymous_bytes())
network = load_folder(folder / "large", dtype=dtype, progress=watch).network
weights = sum(p.numel() * p.element_size() for p in network.parameters())
largest = max(p.numel() * 4 for p in network.parameters())
print(peak - before, weights, largest)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peak_is_the_weights_and_one_tensor(tmp_path, dtype):
    save_folder(Transformer(tiny_config()), tmp_path / "tiny")
    sizes = {"width": 512, "num_layers": 12, "num_heads": 8, "feed_forward": 1536, "vocab_size": 8192}
    save_folder(Transformer(tiny_config(**sizes)), tmp_path / "large")
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, weights, largest = map(int, done.stdout.split())
    assert weights > 80e6
    assert peak <= weights + largest + 8e6, f"peak {peak / 1e6:.0f} MB for weights of {weights / 1e6:.0f} MB"
