"""Quantized folders, PEFT adapters, sentence encoders and classifiers: a valid example of each kind, and what reads it.

makers = build_quantized_kinds(read_model, use_network); files, read = makers["folder in gptq"](folder)
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import clearhead
from clearhead.architecture import Normalize, Pooling, Projection, SentenceConfig, VectorNorm
from clearhead.checkpoint import PeftAdapter, merge_peft_adapter, read_peft_adapter, save_folder, save_peft_adapter
from clearhead.checkpoint.peft_adapter import ModuleChange
from clearhead.families import family_of_type
from clearhead.model import SentencePooler
from clearhead.tokenization import byte_tokenizer
from tests.checkpoint import test_mxfp4
from tests.checkpoint.quantized_files import QUANTIZERS, quantize_folder
from tests.checkpoint.tiny import tiny_network

Read = Callable[[Path, str, bool], Any]
Maker = Callable[[Path], tuple[dict[str, str], Read]]


def build_quantized_kinds(read_model: Read, use_network: Callable[[Any], None]) -> dict[str, Maker]:
    """Return what writes a folder in each quantized format."""

    def write_tiny(folder: Path, name: str) -> None:
        save_folder(tiny_network(width=64, feed_forward=96), folder)
        quantize_folder(folder, name)

    writers = {f"folder in {name}": partial(write_tiny, name=name) for name in QUANTIZERS}
    writers["folder in mxfp4"] = test_mxfp4.write_folder
    return {name: _quantized_maker(write, read_model, use_network) for name, write in writers.items()}


def _quantized_maker(write: Callable[[Path], None], read_model: Read, use_network: Callable[[Any], None]) -> Maker:
    def make(folder: Path) -> tuple[dict[str, str], Read]:
        write(folder)

        def read(folder: Path, file: str, unchanged: bool) -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # which matrices were dequantized
                read_model(folder, file, unchanged)
                use_network(clearhead.load(folder, weights="stored", fast=False).network)

        return {"model.safetensors": "header", "config.json": "json"}, read

    return make


def make_peft_adapter(folder: Path) -> tuple[dict[str, str], Read]:
    """Write an adapter in PEFT's folder format."""
    change = ModuleChange(torch.ones(2, 16), torch.ones(16, 2), 1.5, torch.ones(16))
    changes = {"model.layers.0.self_attn.q_proj": change}
    save_peft_adapter(folder, PeftAdapter("base", changes, False, 3.0, 2, False))

    def read(folder: Path, file: str, unchanged: bool) -> None:
        merge_peft_adapter(tiny_network(), family_of_type("llama"), read_peft_adapter(folder))

    return {"adapter_config.json": "json", "adapter_model.safetensors": "header"}, read


def make_sentence_encoder(folder: Path) -> tuple[dict[str, str], Read]:
    """Write an encoder with the modules of sentence-transformers behind it."""
    model = clearhead.create("bert-base", byte_tokenizer(), tiny=True)
    width = model.network.config.width
    steps = (Projection(input_width=2 * width, width=12, activation="tanh"), VectorNorm(width=12), Normalize())
    prompts = (("query", "query: "), ("passage", "passage: "))
    modes = Pooling(modes=("cls", "mean"))
    sentence = SentenceConfig(width=width, pooling=modes, steps=steps, max_tokens=9, prompts=prompts)
    replace(model, sentence=SentencePooler(sentence)).save(folder, "huggingface")

    def read(folder: Path, file: str, unchanged: bool) -> None:
        vectors = clearhead.load(folder, fast=False).embed(["A cat sat.", "A dog ran, and ran, and ran."])
        assert vectors.ndim == 2
        assert len(vectors) == 2
        assert file.endswith(".safetensors") or bool(torch.as_tensor(vectors).isfinite().all())

    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.parent != folder]
    names += ["modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"]
    return {name: "header" if name.endswith(".safetensors") else "json" for name in sorted(names)}, read


def make_classifier(folder: Path) -> tuple[dict[str, str], Read]:
    """Write a classifier with labels."""
    clearhead.create("electra-small", byte_tokenizer(), tiny=True).save(folder, "huggingface")

    def read(folder: Path, file: str, unchanged: bool) -> None:
        for found in clearhead.load(folder, fast=False).classify(["A cat sat."]):
            repr(found).encode(errors="backslashreplace")

    return {"config.json": "json"}, read
