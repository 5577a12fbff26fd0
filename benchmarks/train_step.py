"""Measure one training step of a character model with 0.8 M parameters on a CPU, and compare it with nanoGPT.

    python benchmarks/train_step.py --peer path/to/nanoGPT [--compile] [--threads 1]

All models have 4 layers of width 128 and 4 heads, read the same 12 rows of 64 tokens, clip the gradient and step with
AdamW. `GPT` is nanoGPT's architecture in our code (layer norm, learned positions, GELU). `recipe` is the model of
configs/shakespeare-cpu.toml, also with the recipe's Muon. nanoGPT trains in float32 on a CPU, ours in float32 and
bfloat16. They take turns, each in its own process, because memory that one has freed would help the next. Without
--peer only ours run. The last line of the output is JSON.
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
from clearhead.training import AdamW, Learner, Muon, World, accumulate_gradients, build_model_config, read_recipe

RECIPE = read_recipe(Path(__file__).parent.parent / "configs" / "shakespeare-cpu.toml").recipe
VOCAB_SIZE = 65  # the characters of tiny Shakespeare
WARM_UP_STEPS, TURN_STEPS = 4, 5

Step = Callable[[], None]


@dataclass(frozen=True)
class Contender:
    """A model to measure."""

    model: str
    changes: dict[str, Any]  # to the recipe's [train] table
    peer: Path | None = None  # a checkout of nanoGPT, if this is nanoGPT


OURS = {
    f"{model} {precision}": Contender(model, {"optimizer": AdamW(), "precision": precision})
    for model in ("GPT", "recipe")
    for precision in ("float32", "bfloat16")
} | {"recipe Muon": Contender("recipe", {"optimizer": cast(Muon, RECIPE.train.optimizer)})}


def nanogpt_architecture(config: ModelConfig) -> ModelConfig:
    """Return nanoGPT's architecture without biases, with the sizes of a config."""
    norm = LayerNorm(epsilon=1e-5, bias=False)
    layers = config.output_stack.layers
    attention = replace(cast(GroupedAttention, layers[0].attention), position=NoPosition(), head_norm=None)
    layer = Layer(attention=attention, feed_forward=FeedForward(width=4 * config.width, activation="gelu"), norm=norm)
    embedding = Embedding(vocab_size=VOCAB_SIZE, positions=LearnedPositions(num_positions=config.context))
    return replace(config, decoder=Stack(embedding=embedding, layers=(layer,) * len(layers), final_norm=norm))


def our_step(batch: Batch, model: str, **changes: Any) -> tuple[Step, int]:
    """Return a function that runs one step of our training, and the number of parameters."""
    config = cast(ModelConfig, build_model_config(RECIPE.model, VOCAB_SIZE))
    network = Transformer(nanogpt_architecture(config) if model == "GPT" else config)
    world = World.single_process()
    learner = Learner(network, replace(RECIPE.train, average=None, **changes), world)
    num_targets = torch.tensor(batch.num_targets)

    def step() -> None:
        accumulate_gradients(learner, batch, num_targets)
        world.clip_gradients(network.parameters(), learner.config.clip)
        learner.update(0)

    return step, sum(weight.numel() for weight in network.parameters())


def nanogpt(folder: Path) -> ModuleType:
    """Import model.py from a checkout of nanoGPT."""
    spec = importlib.util.spec_from_file_location("peer_model", folder / "model.py")
    assert spec is not None
    assert spec.loader is not None
    peer = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = peer  # its dataclasses look up their own module
    spec.loader.exec_module(peer)
    return peer


def peer_step(batch: Batch, folder: Path, compiled: bool) -> tuple[Step, int]:
    """Return a function that runs one step as nanoGPT's train.py does on a CPU, and the number of parameters."""
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


def serve(connection: Connection, contender: Contender, compiled: bool, threads: int) -> None:
    """Run one contender in its process: send its number of parameters, then the milliseconds per step on request."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    ids = torch.randint(VOCAB_SIZE, (12, 65))
    batch = Batch(tokens=ids[:, :-1].contiguous(), targets=ids[:, 1:].contiguous())
    if contender.peer is not None:
        step, num_parameters = peer_step(batch, contender.peer, compiled)
    else:
        step, num_parameters = our_step(batch, contender.model, compile=compiled, **contender.changes)
    for _ in range(WARM_UP_STEPS):
        step()
    connection.send(num_parameters)
    while True:
        connection.recv()  # a request; the parent ends this process
        start = time.perf_counter()
        for _ in range(TURN_STEPS):
            step()
        connection.send((time.perf_counter() - start) / TURN_STEPS * 1e3)


def take_turns(contenders: dict[str, Contender], options: argparse.Namespace) -> tuple[dict[str, int], dict[str, Any]]:
    """Return the number of parameters of each contender, and its milliseconds in each round."""
    spawn = multiprocessing.get_context("spawn")
    connections, processes, num_parameters = {}, [], {}
    try:
        for name, contender in contenders.items():
            connections[name], other_end = spawn.Pipe()
            processes.append(spawn.Process(target=serve, args=(other_end, contender, options.compile, options.threads)))
            processes[-1].start()
            other_end.close()  # otherwise the parent would not notice that the process died
            num_parameters[name] = connections[name].recv()  # one at a time, because each may compile
        times: dict[str, list[float]] = {name: [] for name in connections}
        for _ in range(options.rounds):
            for name, connection in connections.items():
                connection.send(True)
                times[name].append(connection.recv())
    finally:
        for process in processes:
            process.terminate()
    return num_parameters, times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", type=Path, help="folder of a nanoGPT checkout")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    contenders = OURS if options.peer is None else {"nanoGPT": Contender("nanoGPT", {}, options.peer)} | OURS
    num_parameters, times = take_turns(contenders, options)
    medians = {name: round(statistics.median(rounds), 2) for name, rounds in times.items()}
    for name, rounds in times.items():
        spread = (max(rounds) - min(rounds)) / medians[name]
        row = f"{name:<15} {num_parameters[name]:>9,} parameters  {medians[name]:7.2f} ms  spread {spread:.0%}"
        print(row if options.peer is None else f"{row}  {medians['nanoGPT'] / medians[name]:.2f} times nanoGPT")
    print(json.dumps({"milliseconds": medians, "threads": options.threads, "compiled": options.compile}))


if __name__ == "__main__":
    main()
