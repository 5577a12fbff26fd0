"""Check every family at toy size on a device: logits as on the CPU, with and without a cache, finite in bfloat16.

python benchmarks/check_device.py cuda
"""

import json
import sys

import torch

from clearhead.cache import KeyValueCache
from clearhead.families import preset
from clearhead.model import Transformer, fused_attention, reference_attention
from tests.model.toys import VOCAB, redraw
from tests.toy_presets import shrink

NAMES = (
    "gpt1", "gpt2", "gpt3-175b", "gopher-280b", "palm-540b", "llama-3.1-8b", "mistral-7b", "smollm3-3b", "qwen3-0.6b",
    "qwen3-30b-a3b", "gemma-3-1b", "deepseek-v2", "deepseek-v3", "llama-4-scout", "grok-1", "grok-2", "bloom-560m",
    "mpt-7b", "bert-base", "t5-small", "t5-v1.1-small", "bart-base", "marian", "transformer-base",
)  # fmt: skip


@torch.no_grad()
def check(name: str, device: str) -> dict[str, object]:
    network = Transformer(shrink(preset(name))).eval()
    redraw(network)
    tokens = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(0))
    inputs = (tokens, tokens[:, :9]) if network.config.is_encoder_decoder else (tokens,)
    cpu_logits = network(*inputs)
    network.to(device)
    device_inputs = tuple(tensor.to(device) for tensor in inputs)
    device_logits = network(*device_inputs)
    reference_logits = network(*device_inputs, kernel=reference_attention)
    result: dict[str, object] = {
        "model": name,
        "device_against_cpu": (device_logits.cpu() - cpu_logits).abs().max().item(),
        "fused_against_reference": (device_logits - reference_logits).abs().max().item(),
    }
    if network.config.decoder is not None and not network.config.is_encoder_decoder:
        cache = KeyValueCache(network.config)
        chunks = []
        for start in range(0, 24, 4):
            chunks.append(network(tokens[:, start : start + 4].to(device), cache=cache))
            cache.advance()
        result["cached_against_uncached"] = (torch.cat(chunks, 1) - device_logits).abs().max().item()
    bfloat16_logits = network.to(torch.bfloat16)(*device_inputs, kernel=fused_attention)
    result["bfloat16_is_finite"] = bool(bfloat16_logits.isfinite().all())
    return result


if __name__ == "__main__":
    torch.backends.cuda.matmul.allow_tf32 = False
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda" if torch.cuda.is_available() else "cpu"
    rows = [check(name, device) for name in NAMES]
    for row in rows:
        print(json.dumps(row))
    print(json.dumps({"torch": torch.__version__, "device": device, "models": len(rows)}))
