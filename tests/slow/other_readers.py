"""Recipes, data, checkpoints of runs, traces, caches and logs: a valid example of each kind, and what reads it.

makers = build_other_kinds(); files, read = makers["recipe"](folder)
"""

import gzip
import json
import os
import warnings
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import clearhead
from clearhead.api import Model
from clearhead.architecture import ModelConfig
from clearhead.audio import read_audio
from clearhead.cache import KeyValueCache
from clearhead.catalog import has_chat_template
from clearhead.costs.calibration.rates import Calibration, Rate, load_calibration
from clearhead.data import write_shards
from clearhead.data.config import ChatData, PairData, PairTable, ParallelFiles, PreferenceData, ShardData, TextData
from clearhead.data.open import open_data
from clearhead.files import read_text
from clearhead.inspection import Trace
from clearhead.tokenization import byte_tokenizer
from clearhead.training import World, find_recipe, read_recipe, train
from clearhead.training.checkpoints import RunFolder
from clearhead.training.metrics import MetricsLog, read_metrics
from clearhead.training.setup import PAIR_SPECIAL_TOKENS
from clearhead.training.start import start_run
from tests.audio.files import write_wav
from tests.checkpoint.tiny import tiny_config, tiny_network
from tests.slow.tokenizer_readers import CHATML
from tests.training.recipes import quiet_console, recipe

Maker = Callable[[Path], tuple[dict[str, str], Callable[[Path, str, bool], object]]]

CHATS = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": f"Hello {number}"}]}
    for number in range(12)
]


@cache
def chat_tokenizer() -> Any:
    """Return a tokenizer of bytes with start, end and padding, and a chat template."""
    tokenizer = byte_tokenizer(PAIR_SPECIAL_TOKENS)
    tokenizer.chat_template = CHATML
    return tokenizer


def build_other_kinds() -> dict[str, Maker]:
    """Return what writes each of the other kinds."""
    return {
        "wav": _make_wav,
        "recipe": _make_recipe("capitals"),
        "recipe of a book": _make_recipe("shakespeare-cpu"),
        "recipe with adapters": _make_recipe("finetune-lora"),
        "model as TOML": _make_toml,
        "text": _make_data("text.txt", "text", lambda path: TextData(path=path, context=8)),
        "text as gzip": _make_gzip,
        "texts as JSON lines": _make_data("text.jsonl", "json lines", lambda path: TextData(path=path, context=8)),
        "chats as JSON lines": _make_data("chats.jsonl", "json lines", lambda path: ChatData(path=path, context=200)),
        "chats as CSV": _make_data("chats.csv", "text", lambda path: ChatData(path=path, context=200)),
        "preferences": _make_data(
            "preferences.jsonl", "json lines", lambda path: PreferenceData(path=path, context=200)
        ),
        "pairs as CSV": _make_data(
            "pairs.csv", "text", lambda path: PairData(train=PairTable(path=path), context=60, form="continuation")
        ),
        "pairs as TSV": _make_data(
            "pairs.tsv", "text", lambda path: PairData(train=PairTable(path=path), context=60, form="continuation")
        ),
        "parallel texts": _make_parallel,
        "token shards": _make_shards,
        "training checkpoint": _make_checkpoint,
        "metrics": _make_metrics,
        "trace": _make_trace,
        "cache": _make_cache,
        "calibration": _make_calibration,
        "folder in the catalog": _make_folder,
    }


def _make_recipe(name: str) -> Maker:
    def make(folder: Path) -> Any:
        (folder / "mine.toml").write_bytes(find_recipe(name).read_bytes())

        def read(folder: Path, file: str, unchanged: bool) -> None:
            resolved = read_recipe(folder / file)
            clearhead.to_toml(resolved.recipe)
            resolved.describe()
            read_recipe(folder / file, ["--train.steps", "7"], smoke=True)

        return {"mine.toml": "text"}, read

    return make


def _make_toml(folder: Path) -> Any:
    (folder / "model.toml").write_text(clearhead.to_toml(tiny_config()))
    return {"model.toml": "text"}, lambda folder, name, unchanged: clearhead.from_toml(
        ModelConfig, read_text(folder / name)
    )


# --- data

CONTENTS = {
    "text.txt": "A keeper counts lamps.\n\nHe writes the number 17 down.\n" * 10,
    "text.jsonl": "".join(json.dumps({"text": f"Line {number} é", "id": number}) + "\n" for number in range(30)),
    "chats.jsonl": "".join(json.dumps(chat) + "\n" for chat in CHATS),
    "chats.csv": "instruction,input,output\n" + "".join(f'"Say, {n}",,"It is ""{n}"""\n' for n in range(12)),
    "preferences.jsonl": "".join(
        json.dumps({"prompt": f"{n}?", "chosen": "Yes.", "rejected": "No."}) + "\n" for n in range(9)
    )
    + json.dumps(
        {"messages": CHATS[0]["messages"][:1], "chosen": [{"role": "assistant", "content": "A"}], "rejected": "B"}
    )
    + "\n",
    "pairs.csv": "".join(f'"a {n}","b, {n}"\n' for n in range(40)),
    "pairs.tsv": "".join(f"a {n}\tb {n}\n" for n in range(40)),
}


def _use_data(data: Any) -> None:
    tokenizer = chat_tokenizer()
    for dataset in open_data(data, tokenizer, 1):
        rows = np.arange(min(3, len(dataset)))
        batch = dataset.batch(rows, rows.astype(np.uint64))
        assert int(batch.tokens.max()) < tokenizer.vocab_size


def _make_data(name: str, form: str, config: Callable[[str], Any]) -> Maker:
    def make(folder: Path) -> Any:
        (folder / name).write_text(CONTENTS[name], encoding="utf-8")
        return {name: form}, lambda folder, file, unchanged: _use_data(config(str(folder / file)))

    return make


def _make_gzip(folder: Path) -> Any:
    (folder / "text.txt.gz").write_bytes(gzip.compress(CONTENTS["text.txt"].encode()))
    return {"text.txt.gz": "binary"}, lambda folder, name, unchanged: _use_data(
        TextData(path=str(folder / name), context=8)
    )


def _make_parallel(folder: Path) -> Any:
    for name in ("train.en", "train.de"):
        (folder / name).write_text("".join(f"{name} {number}\n" for number in range(40)))
    files = ParallelFiles(source=str(folder / "train.en"), target=str(folder / "train.de"))
    data = PairData(train=files, context=60, form="continuation")
    return {"train.en": "text", "train.de": "text"}, lambda folder, name, unchanged: _use_data(data)


def _make_shards(folder: Path) -> Any:
    tokenizer = chat_tokenizer()
    write_shards(folder, [tokenizer.encode("A keeper counts lamps.") for _ in range(30)], tokenizer)
    forms = {path.name: "json" if path.suffix == ".json" else "binary" for path in folder.iterdir()}
    return forms, lambda folder, name, unchanged: _use_data(ShardData(path=str(folder), context=8))


# --- runs


def _make_checkpoint(folder: Path) -> Any:
    settings = recipe({"train": {"steps": 3, "average": 0.9, "save_every": 3}})
    train(settings, folder, quiet_console())
    newest = folder / "checkpoints" / "step-00000003"
    forms = {str(path.relative_to(folder)): "json" if path.suffix == ".json" else "header" for path in newest.iterdir()}
    world = World.start("ddp", "cpu")
    run = RunFolder(folder, world=world, warn=lambda message: message.encode())
    _, learner, _, _ = start_run(settings, run, world)
    expected = {name: tensor.clone() for name, tensor in learner.weights.items()}

    def read(folder: Path, name: str, unchanged: bool) -> None:
        run.damaged.clear()
        saved = run.latest()
        assert saved is not None
        learner.restore(saved)
        weights = learner.weights
        assert all(torch.equal(weights[name], expected[name]) for name in expected), "other weights were accepted"
        saved.state_table("loader"), saved.state_table("recipe")

    return forms, read


def _make_metrics(folder: Path) -> Any:
    log = MetricsLog(folder, first_step=0)
    for step in range(1, 20):
        log.write({"step": step, "loss": 2.5 / step, "tokens_per_second": 1000.0})

    def read(folder: Path, name: str, unchanged: bool) -> None:
        content = (folder / name).read_bytes()
        for row in read_metrics(folder):
            assert type(row["step"]) is int
            float(row.get("loss", 0.0))
        MetricsLog(folder, first_step=10).write({"step": 11, "loss": 1.0})
        (folder / name).write_bytes(content)

    return {"metrics.jsonl": "json lines"}, read


# --- other


def _make_trace(folder: Path) -> Any:
    Model(tiny_network()).trace([3, 1, 4, 1, 5]).save(folder / "trace.safetensors")

    def read(folder: Path, name: str, unchanged: bool) -> None:
        trace = Trace.load(folder / name)
        trace.attention(0, 0)
        trace.residual(1)
        repr(trace)

    return {"trace.safetensors": "header"}, read


def _make_cache(folder: Path) -> Any:
    network, tokens = tiny_network(), torch.tensor([[3, 1, 4]])
    cache = KeyValueCache(network.config)
    with torch.no_grad():
        network(tokens, cache=cache)
    cache.advance()
    cache.save(folder / "cache.safetensors")

    def read(folder: Path, name: str, unchanged: bool) -> None:
        loaded = KeyValueCache.load(folder / name, network.config)
        size = loaded.batch_size or 1
        with torch.no_grad():
            network(torch.ones(size, 2, dtype=torch.int64), cache=loaded)
        loaded.advance()
        loaded.truncate(min(loaded.length, 2))

    return {"cache.safetensors": "header"}, read


def _make_calibration(folder: Path) -> Any:
    os.environ["CLEARHEAD_HOME"] = str(folder)
    path = folder / "calibration" / "cpu.json"
    path.parent.mkdir()
    rates = {"float32": [Rate((64, 64), 1e9)]}
    calibration = Calibration(
        device="cpu",
        machine="any",
        torch="2",
        memory_bytes=10**9,
        traffic=[],
        products=rates,
        attention=rates,
        attention_backward=rates,
        optimizer={"float32": 1e9},
        kernel_seconds=1e-6,
        host_seconds={"decode": {"each": 1e-6}},
    )
    path.write_text(json.dumps(asdict(calibration)))

    def read(folder: Path, name: str, unchanged: bool) -> None:
        os.environ["CLEARHEAD_HOME"] = str(folder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load_calibration("cpu")

    return {"calibration/cpu.json": "json"}, read


def _make_folder(folder: Path) -> Any:
    Model(tiny_network(vocab_size=257), byte_tokenizer()).save(folder)
    return {"tokenizer_config.json": "json"}, lambda folder, name, unchanged: has_chat_template(folder)


def _make_wav(folder: Path) -> tuple[dict[str, str], Callable[[Path, str, bool], object]]:
    write_wav(folder / "speech.wav", torch.linspace(-1, 1, 400), bits=24, channels=2)
    return {"speech.wav": "binary"}, lambda folder, name, unchanged: read_audio(folder / name)
