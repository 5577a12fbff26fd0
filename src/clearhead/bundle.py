"""A network and its tokenizer under one handle: what users hold.

model = clearhead.load("smollm2"); print(model.generate("The capital of France is", max_new_tokens=8).text)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from clearhead.checkpoint.fill import Progress
from clearhead.checkpoint.huggingface import Loaded, save_folder
from clearhead.checkpoint.load import open_model
from clearhead.checkpoint.native import save_native
from clearhead.errors import ClearheadError, unknown
from clearhead.families import preset
from clearhead.families.family import Family
from clearhead.generation.decode import Sampling, decode, translate
from clearhead.model.config import ModelConfig
from clearhead.model.transformer import Transformer
from clearhead.tokenization.base import StreamDecoder, Tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True)
class Generation:
    """What came out. str(generation) is its text."""

    tokens: list[int]  # new ones only, a stop token included
    text: str
    prompt_tokens: list[int]
    stopped_by: Literal["stop", "length"]

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Model:
    network: Transformer
    tokenizer: Tokenizer | None = None
    family: Family | None = None
    special_ids: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> ModelConfig:
        return self.network.config

    # --- generating

    def generate(self, prompt: str | Sequence[int], **sampling: Any) -> Generation:
        """Continue a text or token ids (an encoder-decoder: answer them). Options: see generation.decode.Sampling."""
        ids = self.encode(prompt)
        tokens = list(self.new_tokens(ids, Sampling(**known_options(sampling))))
        stopped = bool(tokens) and tokens[-1] in self.stop_ids
        kept = tokens[:-1] if stopped else tokens
        text = self.tokenizer.decode(kept) if self.tokenizer is not None else ""
        return Generation(tokens, text, ids, "stop" if stopped else "length")

    def stream(self, prompt: str | Sequence[int], **sampling: Any) -> Iterator[str]:
        """The same text in pieces, each as soon as its characters are whole."""
        pieces = StreamDecoder(self.need_tokenizer())
        for token in self.new_tokens(self.encode(prompt), Sampling(**known_options(sampling))):
            if token not in self.stop_ids:
                yield pieces.push(token)
        yield pieces.finish()

    def new_tokens(self, ids: Sequence[int], sampling: Sampling) -> Iterator[int]:
        if self.config.decoder is None:
            raise ClearheadError("an encoder alone does not generate; use model.embed or model.network")
        if not self.config.is_encoder_decoder:
            return decode(self.network, ids, sampling, self.stop_ids)
        start = self.special_ids.get("decoder_start_token_id", self.special_ids.get("bos_token_id", 0))
        return translate(self.network, ids, start, sampling, self.stop_ids)

    @property
    def stop_ids(self) -> frozenset[int]:
        ends = self.special_ids.get("eos_token_id", [])
        ends = frozenset(ends if isinstance(ends, list) else [ends])
        return ends | (self.tokenizer.stop_ids if self.tokenizer is not None else frozenset())

    # --- embedding

    @torch.inference_mode()
    def embed(self, texts: str | Sequence[str]) -> torch.Tensor:
        """One vector of length 1 per text: the mean of the last hidden states (B, D)."""
        rows = [self.encode(text) for text in ([texts] if isinstance(texts, str) else texts)]
        longest = max(len(row) for row in rows)
        device = next(self.network.parameters()).device
        tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=device)
        if self.config.is_encoder_decoder:
            hidden = self.network.encode(tokens, mask).states
        else:
            hidden = self.network.hidden(tokens, mask)
        mean = (hidden * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)
        return torch.nn.functional.normalize(mean, dim=-1)

    # --- text and ids

    def need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ClearheadError("this model has no tokenizer; give token ids instead of text")
        return self.tokenizer

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        return self.need_tokenizer().encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]

    # --- saving

    def save(self, folder: str | Path, format: Literal["huggingface", "native"] = "native") -> Path:
        """A folder that `clearhead.load` reads again; as `huggingface` also transformers."""
        check_format(format)
        folder = Path(folder)
        if folder.exists() and not folder.is_dir():
            raise ClearheadError(f"{folder} is a file; give a folder to save in")
        if format == "huggingface":
            save_folder(self.network, folder, self.family, self.special_ids)
        else:
            save_native(self.network, folder, self.family.name if self.family else None, self.special_ids)
        if self.tokenizer is not None:
            self.tokenizer.save(folder)
        return folder


def load(
    what: str | Path,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
) -> Model:
    """A model by installed name, folder, .gguf file or hub id; `dtype` None keeps the stored precision."""
    opened = open_model(what, as_dtype(dtype), device, progress)
    loaded: Loaded = opened.loaded
    return Model(loaded.network, opened.tokenizer, loaded.family, loaded.special_ids)


def create(config: ModelConfig | str, tokenizer: Tokenizer | None = None, seed: int = 0) -> Model:
    """A new model with random weights, from a config or the name of a preset."""
    config = preset(config) if isinstance(config, str) else config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Model(Transformer(config).eval(), tokenizer)


def check_format(name: str) -> None:
    if name not in ("huggingface", "native"):
        raise unknown("format", name, ("huggingface", "native"))


def as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise unknown("dtype", dtype, DTYPES)
        return DTYPES[dtype]
    return dtype


def known_options(options: dict[str, Any]) -> dict[str, Any]:
    known = Sampling.__dataclass_fields__
    for name in options:
        if name not in known:
            raise unknown("option of generate:", name, known)
    return options
