"""Every kind of file that Clearhead reads: a small valid example of each, and a function that reads and uses it.

kinds = build_kinds(Path("folder")); kinds[0].read(kinds[0].folder, "config.json", True)
"""

import fnmatch
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import clearhead
from clearhead.api import Model, RecurrentBaseline
from clearhead.backends import pack_network
from clearhead.checkpoint import Adapter, merge_adapter, read_adapter, save_adapter, save_gguf
from clearhead.checkpoint.gguf import open_gguf
from clearhead.checkpoint.gguf_blocks import BLOCK_TYPES
from clearhead.checkpoint.gguf_writer import TensorPlan, write_gguf
from clearhead.checkpoint.huggingface import save_folder
from clearhead.errors import ClearheadError
from clearhead.families import FAMILIES, Family, family_for, preset
from clearhead.model import RecurrentConfig, RecurrentTranslator, Transformer
from clearhead.tokenization import byte_tokenizer
from tests.checkpoint.gguf_toys import longrope_network, toy_network, write_toy
from tests.checkpoint.test_ctranslate2_model import folder_content, marian_model
from tests.checkpoint.test_damaged_files import SIZES, write_gguf_model
from tests.checkpoint.test_gguf_split import split
from tests.checkpoint.test_llama2c import checkpoint_bytes
from tests.checkpoint.tiny import tiny_network
from tests.slow.other_readers import build_other_kinds
from tests.slow.quantized_readers import (
    build_quantized_kinds,
    make_classifier,
    make_peft_adapter,
    make_sentence_encoder,
)
from tests.slow.tokenizer_readers import build_tokenizer_kinds
from tests.toy_presets import shrink

# Reads a folder of which the named file was damaged; the last argument says whether it is unchanged.
Read = Callable[[Path, str, bool], object]


@dataclass(frozen=True)
class Kind:
    """A kind of file."""

    name: str
    folder: Path
    files: dict[str, str]  # files that are damaged, and how: a form of `mutations.mutate`
    read: Read

    @property
    def share(self) -> float:
        """Share of the files, relative to other kinds. The families have similar readers, which also take longest."""
        return 0.25 if self.name.startswith("config of") else 1.0


def build_kinds(folder: Path, pattern: str = "*") -> list[Kind]:
    """Write an example of every kind whose name fits a pattern below a folder, and return these kinds."""
    makers = {**_model_kinds(), **build_tokenizer_kinds(), **build_other_kinds()}
    kinds = []
    for name in fnmatch.filter(makers, pattern):
        make = makers[name]
        path = folder / name.replace(" ", "-")
        path.mkdir(parents=True)
        files, read = make(path)
        kind = Kind(name, path, files, read)
        for file in files:
            kind.read(path, file, True)  # the example itself must be valid
        kinds.append(kind)
    return kinds


Maker = Callable[[Path], tuple[dict[str, str], Read]]


def _model_kinds() -> dict[str, Maker]:
    """Return what writes each kind of model file."""
    families = {f"config of {family.name}": _family_maker(name) for family in FAMILIES if (name := _writable(family))}
    quantized = build_quantized_kinds(read_model, use_network)
    return (
        families
        | quantized
        | {
            "safetensors": _make_safetensors,
            "sharded safetensors": _make_shards,
            "generation config": _make_generation_config,
            "gguf": _make_gguf,
            "gguf with stored blocks": _make_stored_gguf,
            "gguf with experts": _make_gguf_of("qwen2moe"),
            "gguf with fused projections": _make_gguf_of("gptneox"),
            "gguf with latent attention": _make_gguf_of("deepseek2"),
            "gguf with sinks and biases of experts": _make_gguf_of("gpt-oss"),
            "gguf with numbers in metadata": _make_gguf_of("apertus"),
            "gguf with chunks": _make_gguf_of("llama4"),
            "gguf with two placements of norms": _make_gguf_of("falcon"),
            "gguf with an object of settings": _make_gguf_of("mpt"),
            "gguf with a norm of the embeddings": _make_gguf_of("bloom"),
            "gguf with factors of LongRoPE": _make_longrope_gguf,
            "gguf of an encoder": _make_gguf_of("bert"),
            "gguf of an encoder with windows": _make_gguf_of("modern-bert"),
            "gguf of an encoder-decoder": _make_gguf_of("t5"),
            "gguf of every block type": _make_gguf_blocks,
            "split gguf": _make_split_gguf,
            "ctranslate2": _make_ctranslate2,
            "llama2c": _make_llama2c,
            "native description": _make_native("clearhead.json", "json"),
            "native weights": _make_native("weights.safetensors", "header"),
            "native description of packed weights": _make_packed_native("clearhead.json", "json"),
            "native packed weights": _make_packed_native("weights.safetensors", "header"),
            "recurrent description": _make_recurrent("clearhead.json", "json"),
            "recurrent weights": _make_recurrent("weights.safetensors", "header"),
            "adapter description": _make_adapter("adapter.json", "json"),
            "adapter weights": _make_adapter("adapter.safetensors", "header"),
            "peft adapter": make_peft_adapter,
            "sentence encoder": make_sentence_encoder,
            "classifier": make_classifier,
        }
    )


def _writable(family: Family) -> str | None:
    """Return the first preset of a family that can be saved as a Hugging Face folder."""
    for name in family.presets if family.write_config is not None else ():
        with suppress(ClearheadError):
            family_for(shrink(preset(name)))
            return name
    return None


def random_network(config: Any) -> Transformer:
    torch.manual_seed(0)
    return Transformer(config).eval()


def use_network(network: Any) -> None:
    """Compute logits as a user would."""
    tokens = torch.tensor([[1, 2, 0]])
    with torch.no_grad():
        if isinstance(network, Transformer) and network.config.reads_audio:
            audio = network.config.encoder.embedding  # type: ignore[union-attr]
            network(torch.zeros(1, audio.num_mel_bands, 2 * audio.num_positions), tokens)  # type: ignore[union-attr]
            return
        if isinstance(network, RecurrentTranslator) or network.config.is_encoder_decoder:
            network(tokens, tokens)
        else:
            network(tokens)


def read_model(folder: Path, name: str, unchanged: bool) -> Model:
    """Load a model and compute with it."""
    model = clearhead.load(folder, fast=False)
    if model.network.config.context >= 3:
        use_network(model.network)
    return model


def weights_of(model: Model) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.network.state_dict().items()}


def read_with_header_check(expected: dict[str, Tensor]) -> Read:
    """Return a function that loads a model, and fails if its tensors have other names, shapes or kinds of dtype."""
    stored = {name: tensor.numpy().tobytes() for name, tensor in expected.items()}
    known = b"".join(sorted(stored.values()))

    def read(folder: Path, name: str, unchanged: bool) -> None:
        model = read_model(folder, name, unchanged)
        found = weights_of(model)
        assert found.keys() == expected.keys(), "tensors were added or lost"
        for key, tensor in found.items():
            assert tensor.is_floating_point(), f"{key} was read as {tensor.dtype}"
            assert tensor.shape == expected[key].shape, f"{key} has another shape"
        assert len(known) == sum(tensor.nbytes for tensor in found.values())

    return read


def _family_maker(name: str) -> Maker:
    def make(folder: Path) -> tuple[dict[str, str], Read]:
        save_folder(random_network(shrink(preset(name))), folder)
        return {"config.json": "json"}, read_model

    return make


def _make_safetensors(folder: Path) -> tuple[dict[str, str], Read]:
    save_folder(tiny_network(), folder)
    expected = weights_of(clearhead.load(folder, fast=False))
    return {"model.safetensors": "header"}, read_with_header_check(expected)


def _make_shards(folder: Path) -> tuple[dict[str, str], Read]:
    save_folder(tiny_network(), folder, shard_bytes=4000)
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(names) > 1
    return {"model.safetensors.index.json": "json", names[0]: "header", names[-1]: "header"}, read_model


def _make_generation_config(folder: Path) -> tuple[dict[str, str], Read]:
    Model(tiny_network(vocab_size=257), byte_tokenizer(), special_ids={"eos_token_id": 0}).save(folder, "huggingface")
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 3], "bos_token_id": 1, "temperature": 0.6}')

    def read(folder: Path, name: str, unchanged: bool) -> None:
        read_model(folder, name, unchanged).generate("ab", max_new_tokens=2)

    return {"generation_config.json": "json"}, read


def _make_gguf(folder: Path) -> tuple[dict[str, str], Read]:
    small = {"width": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "feed_forward": 64}
    sizes = dict(SIZES)
    SIZES.update(small)
    try:
        write_gguf_model(folder)
    finally:
        SIZES.update(sizes)
    return {"model.gguf": "header"}, lambda folder, name, unchanged: read_model(folder / name, name, unchanged)


def _make_stored_gguf(folder: Path) -> tuple[dict[str, str], Read]:
    """Write a model in Q4_K and Q6_K, and read it without dequantizing its blocks."""
    network = tiny_network(width=256, feed_forward=256, num_layers=2)
    save_gguf(folder / "model.gguf", network, None, file_type="q4_k_m")
    return {"model.gguf": "header"}, _read_stored_gguf


def _make_gguf_of(architecture: str) -> Maker:
    def make(folder: Path) -> tuple[dict[str, str], Read]:
        write_toy(folder / "model.gguf", toy_network(architecture), architecture, file_type="q8_0")
        return {"model.gguf": "header"}, _read_stored_gguf

    return make


def _make_longrope_gguf(folder: Path) -> tuple[dict[str, str], Read]:
    write_toy(folder / "model.gguf", longrope_network(32, 64), "phi3", file_type="q8_0")
    return {"model.gguf": "header"}, _read_stored_gguf


def _read_stored_gguf(folder: Path, name: str, unchanged: bool) -> None:
    model = clearhead.load(folder / name, weights="stored", fast=False)
    if model.network.config.context >= 3:
        use_network(model.network)


def _make_gguf_blocks(folder: Path) -> tuple[dict[str, str], Read]:
    rng, tensors = np.random.default_rng(0), []
    for kind in BLOCK_TYPES.values():
        blocks = torch.from_numpy(rng.integers(0, 256, (2, kind.bytes_per_block), dtype=np.uint8))
        tensors.append(TensorPlan(kind.name, (2, kind.values_per_block), kind.name, lambda blocks=blocks: blocks))
    write_gguf(folder / "model.gguf", {"general.architecture": "llama"}, tensors)

    def read(folder: Path, name: str, unchanged: bool) -> None:
        file = open_gguf(folder / name)
        for tensor_name, described in file.tensors.items():
            assert file.read(tensor_name).shape == described.shape

    return {"model.gguf": "header"}, read


def _make_split_gguf(folder: Path) -> tuple[dict[str, str], Read]:
    save_gguf(folder / "whole.gguf", tiny_network(), None, file_type="f16")
    parts = [part.name for part in split(folder / "whole.gguf", folder, 2)]
    (folder / "whole.gguf").unlink()
    return dict.fromkeys(parts, "header"), lambda folder, name, unchanged: read_model(folder / name, name, unchanged)


def _make_packed_native(name: str, form: str) -> Maker:
    def make(folder: Path) -> tuple[dict[str, str], Read]:
        Model(pack_network(tiny_network(), "int4"), special_ids={"eos_token_id": 2}).save(folder)
        return {name: form}, read_model

    return make


def _make_ctranslate2(folder: Path) -> tuple[dict[str, str], Read]:
    folder_content(marian_model()).write(folder)
    return {"model.bin": "header", "config.json": "json", "shared_vocabulary.json": "json"}, read_model


def _make_llama2c(folder: Path) -> tuple[dict[str, str], Read]:
    content, _ = checkpoint_bytes(torch.Generator().manual_seed(0))
    (folder / "model.bin").write_bytes(content)
    return {"model.bin": "header"}, lambda folder, name, unchanged: read_model(folder / name, name, unchanged)


def _make_native(name: str, form: str) -> Maker:
    def make(folder: Path) -> tuple[dict[str, str], Read]:
        Model(tiny_network(), special_ids={"eos_token_id": 2}).save(folder)
        if form == "json":
            return {name: form}, read_model
        return {name: form}, read_with_header_check(weights_of(clearhead.load(folder, fast=False)))

    return make


def _make_recurrent(name: str, form: str) -> Maker:
    def make(folder: Path) -> tuple[dict[str, str], Read]:
        sizes = {"source_vocab_size": 11, "target_vocab_size": 12, "embedding_width": 8, "width": 8, "context": 9}
        network = RecurrentTranslator(RecurrentConfig(cell="gru", attention="dot_product", **sizes)).eval()
        RecurrentBaseline(network, None, None, {"eos_token_id": 2}).save(folder)
        if form == "json":
            return {name: form}, read_model
        return {name: form}, read_with_header_check(weights_of(clearhead.load(folder)))

    return make


def _make_adapter(name: str, form: str) -> Maker:
    def make(folder: Path) -> tuple[dict[str, str], Read]:
        layer = "decoder.layers.0.attention.query"
        save_adapter(folder, Adapter("base", 2.0, {layer: (torch.ones(2, 16), torch.ones(16, 2))}))

        def read(folder: Path, file: str, unchanged: bool) -> None:
            merge_adapter(tiny_network(), read_adapter(folder))

        return {name: form}, read

    return make
