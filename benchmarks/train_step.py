"""One optimizer step of the character model of configs/shakespeare-cpu.toml on a CPU, beside nanoGPT's in turns.

    python benchmarks/train_step.py --peer path/to/nanoGPT [--compile]

Both have 4 layers of width 128 and 4 heads, read the same 12 rows of 64 tokens in float32, clip the gradient and step
with AdamW; ours once more with the recipe's Muon, and once computing in bfloat16. Without --peer ours run alone. The
last line is JSON.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from clearhead.data.batch import Batch
from clearhead.model.transformer import Transformer
from clearhead.training.distributed import World
from clearhead.training.learner import Learner
from clearhead.training.loop import accumulate
from clearhead.training.models import model_config
from clearhead.training.optimizer import AdamW
from clearhead.training.recipe import read_recipe

RECIPE = Path(__file__).parent.parent / "configs" / "shakespeare-cpu.toml"
VOCAB_SIZE = 65  # the characters of tiny Shakespeare
WARM_STEPS, TURN_STEPS = 3, 5

Step = Callable[[], None]


def our_step(batch: Batch, **changes: Any) -> tuple[Step, int]:
    recipe = read_recipe(RECIPE).recipe
    network = Transformer(model_config(recipe.model, VOCAB_SIZE))  # type: ignore[arg-type]  # no recurrent one
    config = replace(recipe.train, average=None, **changes)
    world = World.alone()
    learner = Learner(network, config, world)
    num_targets = torch.tensor(batch.num_targets)

    def step() -> None:
        accumulate(learner, batch, num_targets)
        world.clip_gradients(network.parameters(), config.clip)
        learner.update(0)

    return step, sum(weight.numel() for weight in network.parameters())


def peer_step(peer: ModuleType, batch: Batch, compiled: bool) -> tuple[Step, int]:
    """As nanoGPT's train.py does it, with its settings for a CPU."""
    shape = {"block_size": 64, "vocab_size": VOCAB_SIZE, "n_layer": 4, "n_head": 4, "n_embd": 128}
    network = peer.GPT(peer.GPTConfig(**shape, dropout=0.0, bias=False))
    optimizer = network.configure_optimizers(0.1, 1e-3, (0.9, 0.99), "cpu")
    forward = torch.compile(network) if compiled else network

    def step() -> None:
        _, loss = forward(batch.tokens, batch.targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, sum(weight.numel() for weight in network.parameters())


def module_at(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("peer_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def take_turns(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of a step in each round."""
    for step in steps.values():
        for _ in range(WARM_STEPS):
            step()
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            for _ in range(TURN_STEPS):
                step()
            found[name].append((time.perf_counter() - start) / TURN_STEPS * 1e3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", type=Path, help="a checkout of nanoGPT")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    torch.manual_seed(0)
    ids = torch.randint(VOCAB_SIZE, (12, 65))
    batch = Batch(tokens=ids[:, :-1].contiguous(), targets=ids[:, 1:].contiguous())
    built = {
        "clearhead": our_step(batch, optimizer=AdamW(), compile=asked.compile),
        "with Muon": our_step(batch, compile=asked.compile),
        "bfloat16": our_step(batch, optimizer=AdamW(), compile=asked.compile, precision="bfloat16"),
    }
    if asked.peer is not None:
        built["nanoGPT"] = peer_step(module_at(asked.peer / "model.py"), batch, asked.compile)
    found = take_turns({name: step for name, (step, _) in built.items()}, asked.rounds)
    medians = {name: round(statistics.median(times), 2) for name, times in found.items()}
    for name, times in found.items():
        spread = (max(times) - min(times)) / medians[name]
        print(f"{name:<10} {built[name][1]:>9,} parameters  {medians[name]:7.2f} ms  spread {spread:.0%}")
    print(json.dumps({"milliseconds": medians, "threads": asked.threads, "compiled": asked.compile}))


if __name__ == "__main__":
    main()
