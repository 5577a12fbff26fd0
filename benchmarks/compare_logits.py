"""Store a digest of every number the networks compute, or compare with digests stored by an earlier version.

    python benchmarks/compare_logits.py store before.json
    python benchmarks/compare_logits.py compare before.json

Use it around a change that must not alter any result. Every preset is shrunk to toy size, its weights are redrawn
from a fixed seed, and the logits are computed with the fused and the reference attention kernel, with gradients, step
by step with a cache, in the CPU kernels, and with packed weights. SmolLM2, if it is installed, also generates text. A
digest is the SHA-256 of the bytes, so a difference in the last bit counts.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

import clearhead
from clearhead.backends import accelerate, pack_network
from clearhead.cache import KeyValueCache
from clearhead.catalog import find_installed
from clearhead.model import Transformer, reference_attention
from tests.model.toys import VOCAB, redraw
from tests.toy_presets import shrink

PROMPT_LENGTH = 12  # tokens read at once before the step-by-step part


def digest(*tensors: Tensor) -> str:
    sha256 = hashlib.sha256()
    for tensor in tensors:
        sha256.update(str((tensor.dtype, tuple(tensor.shape))).encode())
        sha256.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return sha256.hexdigest()[:32]


def toy(name: str) -> Transformer:
    """Return the preset at toy size with weights from a fixed seed."""
    torch.manual_seed(0)
    network = Transformer(shrink(clearhead.preset(name))).eval()
    redraw(network)
    return network


def inputs_for(network: Transformer) -> tuple[Tensor, ...]:
    tokens = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(0))
    return (tokens, tokens[:, :9]) if network.config.is_encoder_decoder else (tokens,)


@torch.inference_mode()
def stepped(network: Transformer, inputs: tuple[Tensor, ...]) -> Tensor:
    """Return the logits of a prompt and of single steps after it, computed with a cache."""
    cache, logits = KeyValueCache(network.config), []
    if network.config.is_encoder_decoder:
        encoded = network.precompute_cross_attention(network.encode(inputs[0]))
        for token in inputs[1].split(1, 1):
            hidden = network.hidden_states(token, encoder_output=encoded, cache=cache)
            logits.append(network.compute_logits(hidden))
            cache.advance()
    else:
        for tokens in (inputs[0][:, :PROMPT_LENGTH], *inputs[0][:, PROMPT_LENGTH:].split(1, 1)):
            logits.append(network(tokens, cache=cache))
            cache.advance()
    return torch.cat([part.float() for part in logits], 1)


def digests_of_preset(name: str) -> Iterator[tuple[str, str]]:
    network = toy(name)
    inputs = inputs_for(network)
    with torch.no_grad():
        yield f"{name} fused", digest(network(*inputs))
        yield f"{name} reference", digest(network(*inputs, kernel=reference_attention))
    network(*inputs).float().square().mean().backward()
    gradients = (parameter.grad for parameter in network.parameters())
    yield f"{name} gradient", digest(*(gradient for gradient in gradients if gradient is not None))
    if network.config.decoder is None:
        return
    yield f"{name} cached", digest(stepped(network, inputs))
    for suffix, dtype in (("", torch.float32), (" bfloat16", torch.bfloat16)):
        network = toy(name).to(dtype)
        if accelerate(network):
            yield f"{name} kernels{suffix}", digest(stepped(network, inputs))
    for bits in ("int8", "int4"):
        network = pack_network(toy(name), bits)  # type: ignore[arg-type]
        accelerate(network)
        yield f"{name} {bits}", digest(stepped(network, inputs))


def digests_of_smollm2() -> Iterator[tuple[str, str]]:
    for weights in ("full", "stored", "int8", "int4"):
        model = clearhead.load("smollm2", weights=weights, fast=True)
        ids = model.encode("The capital of France is a city of great")
        with torch.inference_mode():
            logits = model.network(torch.tensor([ids]), cache=KeyValueCache(model.config))
        yield f"smollm2 {weights}", digest(logits.float())
        greedy = model.generate("The capital of France is", max_new_tokens=40)
        sampling = {"temperature": 1.0, "top_p": 0.9, "seed": 1, "max_new_tokens": 12}
        sampled = model.generate_many(["The sea is", "A cat is"], n=2, **sampling)  # type: ignore[arg-type]
        tokens = repr((greedy.tokens, [one.tokens for one in sampled]))
        yield f"smollm2 {weights} text", hashlib.sha256(tokens.encode()).hexdigest()[:32]


def all_digests() -> dict[str, str]:
    digests = {key: value for name in clearhead.presets() for key, value in digests_of_preset(name)}
    return digests | dict(digests_of_smollm2() if find_installed("smollm2") else ())


def main(action: str, path: Path) -> int:
    torch.set_num_threads(1)
    digests = all_digests()
    if action == "store":
        path.write_text(json.dumps(digests, indent=1), encoding="utf-8")
        print(f"stored {len(digests)} digests in {path}")
        return 0
    before = json.loads(path.read_text(encoding="utf-8"))
    different = sorted(key for key in before.keys() | digests.keys() if before.get(key) != digests.get(key))
    print(f"compared {len(before)} digests: {len(different)} differences", *different, sep="\n")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
