"""Measure one compiled training step on an NVIDIA GPU: tokens per second, MFU and memory, compared with a peer.

    python benchmarks/train_cuda.py gpt2 --peer path/to/nanoGPT      # 124M, 64 rows of 1,024, compared with nanoGPT
    python benchmarks/train_cuda.py llama                            # 1B, 8 rows of 2,048, compared with transformers

`gpt2` has no biases, like nanoGPT's default. nanoGPT computes under autocast. transformers has bfloat16 weights and
moments, its fastest setting. Ours keeps float32 weights. MFU counts 6P + 12·L·D·T operations per token relative to
989 TFLOP/s. The models take turns, each in its own process, and all must fit into memory together. The last line of the
output is JSON.
"""

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from train_step import nanogpt

from clearhead.architecture import Dropout, GroupedAttention, LayerNorm, ModelConfig
from clearhead.data import Batch
from clearhead.families import preset
from clearhead.model import Transformer
from clearhead.training import AdamW, Constant, Learner, TrainConfig, World, accumulate_gradients, flops_per_token

PEAK_FLOPS = 989e12  # H100 and H200, dense bfloat16
VOCAB_SIZE = 50304  # GPT-2's, rounded up to a multiple of 128
WARM_UP_STEPS, TURN_STEPS, ROUNDS = 3, 8, 4

Step = Callable[[], None]


@dataclass(frozen=True)
class Work:
    """The batch to train on, and the library to compare with."""

    rows: int
    length: int
    peer: str


WORK = {"gpt2": Work(64, 1024, "nanoGPT"), "llama": Work(8, 2048, "transformers")}


def model_config(model: str) -> ModelConfig:
    """Return the config of Llama 3.2 1B, or of GPT-2 without biases."""
    if model == "llama":
        return preset("llama-3.2-1b")
    gpt2 = preset("gpt2")
    stack = gpt2.output_stack
    norm = replace(cast(LayerNorm, stack.final_norm), bias=False)
    layers = [
        replace(
            layer,
            attention=replace(cast(GroupedAttention, layer.attention), input_bias=False, output_bias=False),
            feed_forward=replace(cast(Any, layer.feed_forward), bias=False),
            norm=norm,
        )
        for layer in stack.layers
    ]
    embedding = replace(stack.embedding, vocab_size=VOCAB_SIZE)
    decoder = replace(stack, embedding=embedding, layers=tuple(layers), final_norm=norm)
    return replace(gpt2, decoder=decoder, dropout=Dropout())


def our_step(model: str, tokens: Tensor) -> Step:
    network = Transformer(model_config(model))
    world = World.start(device="cuda")
    settings = {"precision": "bfloat16", "compile": True, "device": "cuda", "schedule": Constant()}
    config = TrainConfig(steps=1, batch_size=len(tokens), optimizer=AdamW(weight_decay=0.1), **settings)  # type: ignore[arg-type]
    learner = Learner(network, config, world)
    batch = Batch(tokens=tokens[:, :-1].contiguous(), targets=tokens[:, 1:].contiguous())
    num_targets = torch.tensor(batch.num_targets, device="cuda")

    def step() -> None:
        loss = accumulate_gradients(learner, batch, num_targets)
        norm = world.clip_gradients(network.parameters(), config.clip)
        torch.stack((loss, norm, num_targets)).tolist()  # wait for the device, as training/loop.py does
        learner.update(0)

    return step


def nanogpt_step(folder: Path, tokens: Tensor) -> Step:
    """Return a step as nanoGPT's train.py runs it."""
    peer = nanogpt(folder)
    shape = {"block_size": 1024, "vocab_size": VOCAB_SIZE, "n_layer": 12, "n_head": 12, "n_embd": 768}
    network = peer.GPT(peer.GPTConfig(**shape, dropout=0.0, bias=False)).cuda()
    optimizer = network.configure_optimizers(0.1, 6e-4, (0.9, 0.95), "cuda")
    forward, inputs, targets = torch.compile(network), tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return cast(Tensor, forward(inputs, targets)[1])

    return plain_step(network, optimizer, loss)


def transformers_step(tokens: Tensor) -> Step:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "rope_theta": 500000.0}
    config = LlamaConfig(**shape, **heads, tie_word_embeddings=True, use_cache=False)
    with torch.device("cuda"):
        network = LlamaForCausalLM(config).to(torch.bfloat16).train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)
    forward, inputs = torch.compile(network), tokens[:, :-1].contiguous()
    return plain_step(network, optimizer, lambda: forward(input_ids=inputs, labels=inputs).loss)


def plain_step(network: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> Step:
    def step() -> None:
        loss().backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def serve(connection: Connection, name: str, model: str, folder: Path | None) -> None:
    """Run one model in its process: report when it is ready, then send seconds per step and peak memory on request."""
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    tokens = torch.randint(1000, (WORK[model].rows, WORK[model].length + 1), device="cuda")
    if name == "clearhead":
        step = our_step(model, tokens)
    else:
        step = transformers_step(tokens) if model == "llama" else nanogpt_step(cast(Path, folder), tokens)
    for _ in range(WARM_UP_STEPS):
        step()
    torch.cuda.synchronize()
    connection.send(True)
    while True:
        connection.recv()  # a request; the parent ends this process
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        for _ in range(TURN_STEPS):
            step()
        torch.cuda.synchronize()
        connection.send(((time.perf_counter() - start) / TURN_STEPS, torch.cuda.max_memory_allocated()))


def take_turns(connections: dict[str, Connection]) -> dict[str, list[tuple[float, int]]]:
    """Return the seconds per step and the peak memory of each model in each round."""
    for connection in connections.values():
        connection.recv()
    measurements: dict[str, list[tuple[float, int]]] = {name: [] for name in connections}
    for _ in range(ROUNDS):
        for name, connection in connections.items():
            connection.send(True)
            measurements[name].append(connection.recv())
    return measurements


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=WORK)
    parser.add_argument("--peer", type=Path, help="folder of a nanoGPT checkout, for gpt2")
    options = parser.parse_args()
    work = WORK[options.model]
    names = ["clearhead"] if options.model == "gpt2" and options.peer is None else [work.peer, "clearhead"]
    spawn = multiprocessing.get_context("spawn")
    connections, processes = {}, []
    for name in names:  # all compile at once
        connections[name], other_end = spawn.Pipe()
        processes.append(spawn.Process(target=serve, args=(other_end, name, options.model, options.peer)))
        processes[-1].start()
        other_end.close()  # otherwise the parent would not notice that the process died
    try:
        measurements = take_turns(connections)
    finally:
        for process in processes:
            process.terminate()
    flops = flops_per_token(model_config(options.model), work.length)
    rows = {}
    for name, rounds in measurements.items():
        seconds = statistics.median(seconds for seconds, _ in rounds)
        rate = work.rows * work.length / seconds
        rows[name] = {"tokens_per_second": round(rate), "mfu": round(rate * flops / PEAK_FLOPS, 3)}
        rows[name] |= {"peak_gigabytes": round(max(num_bytes for _, num_bytes in rounds) / 1e9, 1)}
        print(f"{name:<13}{rate:>10,.0f} tokens/s  MFU {rows[name]['mfu']:.1%}  {rows[name]['peak_gigabytes']} GB")
    print(json.dumps({"model": options.model, "gpu": torch.cuda.get_device_name(), "rows": rows}))


if __name__ == "__main__":
    main()
