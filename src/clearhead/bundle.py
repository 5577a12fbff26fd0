"""A network and its tokenizer under one handle: what users hold.

    model = clearhead.load("smollm2"); print(model.generate("The capital of France is", max_new_tokens=8))

Options of generation (temperature, top_p, seed, stop, …) are those of generation/options.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from clearhead.checkpoint.fill import Progress
from clearhead.checkpoint.huggingface import save_folder
from clearhead.checkpoint.load import open_model
from clearhead.checkpoint.native import save_native
from clearhead.conversation import Chat
from clearhead.errors import ClearheadError, unknown
from clearhead.families import preset
from clearhead.families.family import Family
from clearhead.generation.decode import Row, decode
from clearhead.generation.options import SamplingOptions
from clearhead.generation.score import Score, score
from clearhead.generation.transcript import Transcript
from clearhead.model.config import ModelConfig
from clearhead.model.transformer import Memory, Transformer
from clearhead.tokenization.base import Tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True)
class Generation:
    """What came out. str(generation) is its text."""

    tokens: list[int]  # new ones only, a stop token included
    text: str
    prompt_tokens: list[int]
    stopped_by: str  # stop, length
    logprobs: list[float] | None = None  # of the tokens, where asked for
    top_logprobs: list[dict[int, float]] | None = None

    def __str__(self) -> str:
        return self.text

    @staticmethod
    def of(row: Row, transcript: Transcript | None) -> "Generation":
        stopped_by = transcript.stopped_by if transcript is not None else row.stopped_by
        made = Generation(row.tokens, transcript.text if transcript else "", list(row.source or row.prompt), stopped_by)
        if row.options.logprobs is None:
            return made
        top = [dict(zip(step.top_ids.tolist(), step.top.tolist(), strict=True)) for step in row.logprobs]
        return replace(made, logprobs=[float(step.chosen) for step in row.logprobs], top_logprobs=top)


@dataclass(frozen=True)
class Model:
    network: Transformer
    tokenizer: Tokenizer | None = None
    family: Family | None = None
    special_ids: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        first = next(self.network.parameters())
        count = sum(parameter.numel() for parameter in self.network.parameters())
        name = self.family.name if self.family else "own"
        return f"Model({name}, {count:,} parameters, {str(first.dtype).removeprefix('torch.')}, {first.device})"

    @property
    def config(self) -> ModelConfig:
        return self.network.config

    # --- generating

    def generate(self, prompt: str | Sequence[int], **options: Any) -> Generation:
        """Continue a text or token ids; an encoder-decoder answers them."""
        return self.generate_many([prompt], **options)[0]

    def generate_many(self, prompts: Sequence[str | Sequence[int]], n: int = 1, **options: Any) -> list[Generation]:
        """Several prompts as one batch, n samples of each; what a row gives does not depend on its neighbours."""
        rows = [row for prompt in prompts for row in self.rows(prompt, n, options)]
        if not rows:
            return []
        transcripts = [Transcript(self.tokenizer, row) for row in rows] if self.tokenizer is not None else None
        for _ in self.turns(rows):
            for transcript in transcripts or ():
                transcript.read()
        return [Generation.of(row, transcripts[number] if transcripts else None) for number, row in enumerate(rows)]

    def stream(self, prompt: str | Sequence[int], **options: Any) -> Iterator[str]:
        """The text of one generation in pieces, each as soon as its characters are whole."""
        rows = self.rows(prompt, 1, options)
        transcript = Transcript(self.need_tokenizer(), rows[0])
        for _ in self.turns(rows):
            yield transcript.read()

    def rows(self, prompt: str | Sequence[int], n: int, options: dict[str, Any]) -> list[Row]:
        """n rows of one prompt, each with a seed of its own."""
        for name in options:
            if name not in SamplingOptions.__dataclass_fields__:
                raise unknown("option of generate:", name, SamplingOptions.__dataclass_fields__)
        if n < 1:
            raise ClearheadError(f"n is {n}; it must be at least 1")
        ids, asked = self.encode(prompt), SamplingOptions(**options).seeded()
        if asked.stop:
            self.need_tokenizer()  # a stop string is found in the text
        asked = replace(asked, stop_ids=(*asked.stop_ids, *self.stop_ids))
        seeds = [(asked.seed or 0) + number for number in range(n)]
        if self.config.is_encoder_decoder:
            return [Row([self.decoder_start], replace(asked, seed=seed), source=ids) for seed in seeds]
        return [Row(ids, replace(asked, seed=seed)) for seed in seeds]

    def turns(self, rows: list[Row]) -> Iterator[None]:
        if self.config.decoder is None:
            raise ClearheadError("an encoder alone does not generate; use model.embed or model.network")
        memory = self.read_sources([row.source for row in rows]) if self.config.is_encoder_decoder else None
        return decode(self.network, rows, memory=memory)

    @torch.inference_mode()
    def read_sources(self, sources: Sequence[Sequence[int]]) -> Memory:
        """What the encoder leaves of each; equal ones are read once."""
        different = list(dict.fromkeys(map(tuple, sources)))
        tokens, mask = self.padded(different)
        memory = self.network.remember(self.network.encode(tokens, mask))
        places = [different.index(tuple(source)) for source in sources]
        return memory.select(torch.tensor(places, device=tokens.device))

    def padded(self, rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and mask (B, T), filled up on the right."""
        device, longest = next(self.network.parameters()).device, max(len(row) for row in rows)
        tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
        lengths = torch.tensor([[len(row)] for row in rows], device=device)
        return tokens, torch.arange(longest, device=device)[None] < lengths

    @property
    def decoder_start(self) -> int:
        return int(self.special_ids.get("decoder_start_token_id", self.special_ids.get("bos_token_id", 0)))

    @property
    def stop_ids(self) -> frozenset[int]:
        """Of the config and of the tokenizer, as far as the network can say them."""
        ends = self.special_ids.get("eos_token_id", [])
        known = frozenset(ends if isinstance(ends, list) else [ends])
        known |= self.tokenizer.stop_ids if self.tokenizer is not None else frozenset()
        return frozenset(token for token in known if token < self.config.vocab_size)

    def chat(self, system: str | None = None) -> Chat:
        """A conversation that keeps its cache between turns."""
        return Chat(self, system)

    # --- reading

    def score(self, text: str | Sequence[int]) -> Score:
        """How likely a text is: the log-probability of each token after those before it, and the perplexity."""
        if self.config.decoder is None or self.config.is_encoder_decoder:
            raise ClearheadError("only a decoder alone scores a text")
        return score(self.network, self.encode(text))

    @torch.inference_mode()
    def embed(self, texts: str | Sequence[str]) -> torch.Tensor:
        """One vector of length 1 per text: the mean of the last hidden states (B, D)."""
        rows = [self.encode(text) for text in ([texts] if isinstance(texts, str) else texts)]
        if not rows or not all(rows):
            raise ClearheadError("there is a text without tokens; an embedding needs at least one")
        tokens, mask = self.padded(rows)
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
        other = "clearhead.json" if format == "huggingface" else "config.json"
        if (folder / other).exists():
            raise ClearheadError(f"{folder} holds a model in another format ({other}); give another folder")
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
    opened = open_model(what, as_dtype(dtype), as_device(device), progress)
    return Model(opened.loaded.network, opened.tokenizer, opened.loaded.family, opened.loaded.special_ids)


def create(config: ModelConfig | str, tokenizer: Tokenizer | None = None, seed: int = 0) -> Model:
    """A new model with random weights, from a config or the name of a preset."""
    config = preset(config) if isinstance(config, str) else config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Model(Transformer(config).eval(), tokenizer)


def as_device(device: torch.device | str | None) -> torch.device | None:
    """One that is here, before a checkpoint is read for it."""
    if device is None:
        return None
    try:
        torch.empty(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ClearheadError(f"there is no device {str(device)!r} here; cpu always works") from None
    return torch.device(device)


def check_format(name: str) -> None:
    if name not in ("huggingface", "native"):
        raise unknown("format", name, ("huggingface", "native"))


def as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise unknown("dtype", dtype, DTYPES)
        return DTYPES[dtype]
    return dtype
