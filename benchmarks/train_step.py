"""One optimizer step of a character model of 0.8 M parameters on a CPU, ours and nanoGPT's in turns.

    python benchmarks/train_step.py --peer path/to/nanoGPT [--compile] [--threads 1]

All have 4 layers of width 128 and 4 heads, read the same 12 rows of 64 tokens, clip the gradient and step with AdamW.
`GPT` is nanoGPT's architecture in our code: layer norm, learned positions, GELU; `recipe` is the model of
configs/shakespeare-cpu.toml, once more with that recipe's Muon. nanoGPT trains in float32 on a CPU; ours in float32 and
in bfloat16. Each has a process of its own, since memory that one has freed would serve the next. Without --peer ours
run alone. The last line is JSON.
"""

import argparse
import importlib.util
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch

from clearhead.architecture import (
    Embedding,
    FeedForward,
    GroupedAttention,
    Layer,
    LayerNorm,
    LearnedPositions,
    ModelConfig,
    NoPosition,
    Stack,
)
from clearhead.data import Batch
from clearhead.model import Transformer
from clearhead.training import AdamW, Learner, Muon, World, accumulate, model_config, read_recipe

RECIPE = read_recipe(Path(__file__).parent.parent / "configs" / "shakespeare-cpu.toml").recipe
VOCAB_SIZE = 65  # the characters of tiny Shakespeare
WARM_STEPS, TURN_STEPS = 4, 5

Step = Callable[[], None]


@dataclass(frozen=True)
class Contender:
    model: str
    changes: dict[str, Any]  # of the recipe's training
    peer: Path | None = None


OURS = {
    f"{model} {precision}": Contender(model, {"optimizer": AdamW(), "precision": precision})
    for model in ("GPT", "recipe")
    for precision in ("float32", "bfloat16")
} | {"recipe Muon": Contender("recipe", {"optimizer": cast(Muon, RECIPE.train.optimizer)})}


def gpt(config: ModelConfig) -> ModelConfig:
    """nanoGPT's architecture without biases, in the sizes of this config."""
    norm = LayerNorm(epsilon=1e-5, bias=False)
    layers = config.output_stack.layers
    attention = replace(cast(GroupedAttention, layers[0].attention), position=NoPosition(), head_norm=None)
    layer = Layer(attention=attention, feed_forward=FeedForward(width=4 * config.width, activation="gelu"), norm=norm)
    embedding = Embedding(vocab_size=VOCAB_SIZE, positions=LearnedPositions(num_positions=config.context))
    return replace(config, decoder=Stack(embedding=embedding, layers=(layer,) * len(layers), final_norm=norm))


def our_step(batch: Batch, model: str, **changes: Any) -> tuple[Step, int]:
    config = cast(ModelConfig, model_config(RECIPE.model, VOCAB_SIZE))
    network = Transformer(gpt(config) if model == "GPT" else config)
    world = World.alone()
    learner = Learner(network, replace(RECIPE.train, average=None, **changes), world)
    num_targets = torch.tensor(batch.num_targets)

    def step() -> None:
        accumulate(learner, batch, num_targets)
        world.clip_gradients(network.parameters(), learner.config.clip)
        learner.update(0)

    return step, sum(weight.numel() for weight in network.parameters())


def nanogpt(folder: Path) -> ModuleType:
    """The model.py of a checkout."""
    spec = importlib.util.spec_from_file_location("peer_model", folder / "model.py")
    assert spec is not None
    assert spec.loader is not None
    peer = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = peer  # its dataclasses look themselves up
    spec.loader.exec_module(peer)
    return peer


def peer_step(batch: Batch, folder: Path, compiled: bool) -> tuple[Step, int]:
    """As nanoGPT's train.py does it, with its settings for a CPU."""
    peer = nanogpt(folder)
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


def serve(line: Connection, contender: Contender, compiled: bool, threads: int) -> None:
    """The process of one contender: the number of its parameters, then milliseconds of a step for each call."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    ids = torch.randint(VOCAB_SIZE, (12, 65))
    batch = Batch(tokens=ids[:, :-1].contiguous(), targets=ids[:, 1:].contiguous())
    if contender.peer is not None:
        step, num_parameters = peer_step(batch, contender.peer, compiled)
    else:
        step, num_parameters = our_step(batch, contender.model, compile=compiled, **contender.changes)
    for _ in range(WARM_STEPS):
        step()
    line.send(num_parameters)
    while True:
        line.recv()  # its turn; the parent ends this process
        start = time.perf_counter()
        for _ in range(TURN_STEPS):
            step()
        line.send((time.perf_counter() - start) / TURN_STEPS * 1e3)


def take_turns(contenders: dict[str, Contender], asked: argparse.Namespace) -> tuple[dict[str, int], dict[str, Any]]:
    """The number of parameters of each, and its milliseconds in each round."""
    spawn = multiprocessing.get_context("spawn")
    lines, processes, num_parameters = {}, [], {}
    try:
        for name, contender in contenders.items():
            lines[name], theirs = spawn.Pipe()
            processes.append(spawn.Process(target=serve, args=(theirs, contender, asked.compile, asked.threads)))
            processes[-1].start()
            theirs.close()  # or the death of a process is never heard
            num_parameters[name] = lines[name].recv()  # one after the other, for each may compile
        found: dict[str, list[float]] = {name: [] for name in lines}
        for _ in range(asked.rounds):
            for name, line in lines.items():
                line.send(True)
                found[name].append(line.recv())
    finally:
        for process in processes:
            process.terminate()
    return num_parameters, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", type=Path, help="a checkout of nanoGPT")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args()
    contenders = OURS if asked.peer is None else {"nanoGPT": Contender("nanoGPT", {}, asked.peer)} | OURS
    num_parameters, found = take_turns(contenders, asked)
    medians = {name: round(statistics.median(times), 2) for name, times in found.items()}
    for name, times in found.items():
        spread = (max(times) - min(times)) / medians[name]
        row = f"{name:<15} {num_parameters[name]:>9,} parameters  {medians[name]:7.2f} ms  spread {spread:.0%}"
        print(row if asked.peer is None else f"{row}  {medians['nanoGPT'] / medians[name]:.2f} times nanoGPT")
    print(json.dumps({"milliseconds": medians, "threads": asked.threads, "compiled": asked.compile}))


if __name__ == "__main__":
    main()
