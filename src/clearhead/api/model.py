"""A network and its tokenizer under one handle: what users hold.

    model = clearhead.load("smollm2"); print(model.generate("The capital of France is", max_new_tokens=8))

Options of generation (temperature, top_p, seed, stop, …) are those of generation/options.py; how texts come about is
told in generation/text_generator.py.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from clearhead.api.chat import Chat
from clearhead.architecture import ModelConfig
from clearhead.backends import PackedMatrix, is_packed
from clearhead.checkpoint import LoadedModel, check_target, save_folder, save_native
from clearhead.errors import ClearheadError, unknown_name
from clearhead.generation import (
    Generation,
    Prompt,
    Score,
    Speculation,
    Stream,
    TextGenerator,
    check_scores,
    check_tokens,
    explain_out_of_memory,
    pad_right,
    score,
    token_ids,
)
from clearhead.home import expand_user

if TYPE_CHECKING:
    from clearhead.inspection import Trace


@dataclass(frozen=True, eq=False, repr=False)
class Model(LoadedModel):
    """What a checkpoint holds, and what can be done with it."""

    in_graph: bool = True  # steps on an NVIDIA GPU in one CUDA graph, where it knows the model

    def __repr__(self) -> str:
        first = next(self.network.parameters())
        packed = [part.packed for part in self.network.modules() if isinstance(part, PackedMatrix)]
        count = sum(parameter.numel() for parameter in self.network.parameters())
        count += sum(rows * columns for rows, columns in (matrix.shape for matrix in packed))
        name = self.family.name if self.family else "own"
        dtype = str(first.dtype).removeprefix("torch.") + (" with packed weights" if packed else "")
        return f"Model({name}, {count:,} parameters, {dtype}, {first.device})"

    @property
    def config(self) -> ModelConfig:
        return self.network.config

    @property
    def text_generator(self) -> TextGenerator:
        """What turns prompts into texts."""
        return TextGenerator(self.network, self.tokenizer, self.special_ids, self.in_graph)

    # --- generating

    def generate(self, prompt: Prompt, **options: Any) -> Generation:
        """Continue a text or token ids; an encoder-decoder answers them. Options as of `generate_many`."""
        if "n" in options:
            raise ClearheadError("generate gives one text; generate_many([prompt], n=…) gives several")
        return self.generate_many([prompt], **options)[0]

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        n: int = 1,
        *,
        beams: int | None = None,
        speculate: "Speculation | Model | None" = None,
        **options: Any,
    ) -> list[Generation]:
        """n texts of each prompt; what a prompt gives does not depend on its neighbours.

        Sampled by default, under the options of `SamplingOptions`. `beams`: the n best of a search, under those of
        `BeamOptions` (length_penalty, stop_when). `speculate`: the same text sooner, by guesses from the text itself
        ("lookup") or from a smaller model.
        """
        check_prompts(prompts)
        if beams is None:
            return self.text_generator.sample(prompts, n, options, speculation_of(speculate))
        if speculate is not None:
            raise ClearheadError("beams and speculate exclude each other; give one of them")
        return self.text_generator.search(prompts, n, beams, options)

    def stream(self, prompt: Prompt, *, speculate: "Speculation | Model | None" = None, **options: Any) -> Stream:
        """The text of one sample as it comes; iterate over it, then see its `generation`."""
        if "n" in options:
            raise ClearheadError("a stream is one text; generate_many([prompt], n=…) gives several")
        if "beams" in options:
            raise ClearheadError("beams know their text only at the end; they do not stream, so use generate")
        return self.text_generator.stream(prompt, options, speculation_of(speculate))

    def chat(self, system: str | None = None) -> Chat:
        """A conversation that keeps its cache between turns."""
        return Chat(self.text_generator, system)

    # --- reading

    def trace(self, text: Prompt, source: Prompt | None = None, *, keep_heads: bool = False) -> "Trace":
        """One forward on the fast path, to be looked into afterwards: trace.attention(layer, head), trace.logits, …"""
        from clearhead.inspection import trace  # a room of its own, that most never enter

        return trace(self, text, source, keep_heads=keep_heads)

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a text; ids as they are."""
        return token_ids(prompt, self.tokenizer)

    def score(self, text: Prompt) -> Score:
        """How likely a text is: the log-probability of each token after those before it, and the perplexity."""
        check_scores(self.config)
        with explain_out_of_memory():
            return score(self.network, self.encode(text))

    @torch.no_grad()
    def embed(self, texts: str | Sequence[Prompt]) -> torch.Tensor:
        """One vector of length 1 per text: the mean of the last hidden states (B, D)."""
        if not isinstance(texts, Iterable):
            raise ClearheadError(f"the texts are {texts!r}; give one text or a list of them")
        rows = [self.encode(text) for text in ([texts] if isinstance(texts, str) else texts)]
        if not rows:
            raise ClearheadError("there is no text to embed; give at least one")
        stack = self.config.encoder or self.config.output_stack
        for row in rows:
            check_tokens(row, stack)
        tokens, mask = pad_right(rows, self.network.device)
        with explain_out_of_memory():
            if self.config.is_encoder_decoder:
                hidden = self.network.encode(tokens, mask).states
            else:
                hidden = self.network.hidden_states(tokens, mask)
        mean = (hidden * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)
        return torch.nn.functional.normalize(mean, dim=-1)

    # --- saving

    def save(self, folder: str | Path, format: Literal["huggingface", "native"] = "native") -> Path:
        """A folder that `clearhead.load` reads again; as `huggingface` also transformers."""
        check_format(format)
        folder = expand_user(folder)
        if is_packed(self.network):
            raise ClearheadError("packed weights are not saved: load the model with full weights to save it")
        check_target(folder, format, self.tokenizer)
        if format == "huggingface":
            save_folder(self.network, folder, self.family, self.special_ids)
        else:
            save_native(self.network, folder, self.family.name if self.family else None, self.special_ids)
        if self.tokenizer is not None:
            self.tokenizer.save(folder)
        return folder


def check_prompts(prompts: object) -> None:
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        raise ClearheadError(f"the prompts are {prompts!r}; give a list of them, or one to generate")


def speculation_of(speculate: Speculation | Model | None) -> Speculation | None:
    return speculate.network if isinstance(speculate, Model) else speculate


def check_format(name: str) -> None:
    if name not in ("huggingface", "native"):
        raise unknown_name("format", name, ("huggingface", "native"))
