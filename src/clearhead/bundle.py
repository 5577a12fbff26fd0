"""A network and its tokenizer under one handle: what users hold.

    model = clearhead.load("smollm2"); print(model.generate("The capital of France is", max_new_tokens=8))

Options of generation (temperature, top_p, seed, stop, …) are those of generation/options.py; how texts come about is
told in generation/text_generator.py.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from clearhead.architecture import ModelConfig
from clearhead.backends import (
    PackedMatrix,
    accelerate,
    is_packed,
    kernel_library,
    pack_network,
    why_no_cpu_kernels,
    why_no_cuda_graph,
)
from clearhead.chat import Chat
from clearhead.checkpoint import (
    LoadedModel,
    Progress,
    check_target,
    folder_tokenizer,
    is_recurrent,
    load_recurrent,
    open_model,
    save_folder,
    save_native,
)
from clearhead.errors import ClearheadError, unknown_name
from clearhead.families import preset
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
    translate,
)
from clearhead.home import expand_user
from clearhead.model import RecurrentTranslator, Transformer
from clearhead.options import SamplingOptions
from clearhead.tokenization import Tokenizer

if TYPE_CHECKING:
    from clearhead.inspection import Trace

Weights = Literal["full", "stored", "int8", "int4"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


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


@dataclass(frozen=True, repr=False)
class RecurrentBaseline(Model):
    """The baseline before the Transformer. It answers texts; whoever asks for a Transformer's config is told so."""

    network: RecurrentTranslator  # type: ignore[assignment]  # its own config is network.config

    @property
    def config(self) -> ModelConfig:
        raise ClearheadError("this model is a recurrent network: it generates and is saved, and no more")

    @property
    def text_generator(self) -> TextGenerator:
        raise ClearheadError("a recurrent network neither streams nor chats; generate gives its text whole")

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        n: int = 1,
        *,
        max_new_tokens: int = SamplingOptions.max_new_tokens,
        **options: Any,
    ) -> list[Generation]:
        """The likeliest token at each step; there is nothing else to choose."""
        check_prompts(prompts)
        SamplingOptions(max_new_tokens=max_new_tokens)  # refuses what is no such number
        greedy = n == 1 and all(options[name] in (None, 0) for name in options)
        if not greedy or options.keys() - {"temperature", "beams", "speculate"}:
            raise ClearheadError("a recurrent network takes its likeliest token; give it max_new_tokens alone")
        sources = [self.encode(prompt) for prompt in prompts]
        start, stop = self.special_ids["decoder_start_token_id"], self.special_ids["eos_token_id"]
        said = translate(self.network, sources, start_id=start, stop_ids={stop}, max_new_tokens=max_new_tokens)
        return [self.told(source, answer, stop) for source, answer in zip(sources, said, strict=True)]

    def save(self, folder: str | Path, format: Literal["huggingface", "native"] = "native") -> Path:
        if format == "huggingface":
            raise ClearheadError("transformers has no such recurrent network; save it as native")
        return super().save(folder, format)

    def told(self, source: list[int], answer: list[int], stop: int) -> Generation:
        text = "" if self.tokenizer is None else self.tokenizer.decode([token for token in answer if token != stop])
        return Generation(answer, text, source, "stop" if answer[-1:] == [stop] else "length")


def check_prompts(prompts: object) -> None:
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        raise ClearheadError(f"the prompts are {prompts!r}; give a list of them, or one to generate")


def load(
    what: str | Path,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
    *,
    weights: Weights = "full",
    fast: bool | None = None,
) -> Model:
    """A model by installed name, folder, .gguf file or hub id; `dtype` None keeps the stored precision.

    `weights`: `int8` or `int4` packs them, `stored` runs a .gguf file from its own blocks; all else is then kept in
    bfloat16, unless `dtype` says otherwise. `fast`: tokens are made in kernels; True builds them for this processor,
    which takes seconds once, None uses them where they are built, False leaves it to PyTorch.
    """
    if weights not in get_args(Weights):
        raise unknown_name("weights", str(weights), get_args(Weights))
    precision = as_dtype(dtype) or (None if weights == "full" else torch.bfloat16)
    place = as_device(device, precision)
    if is_recurrent(what):
        if fast or weights != "full":
            raise ClearheadError(f"{what} holds a recurrent network, which has full weights and no fast step")
        folder = expand_user(what)
        network, special_ids = load_recurrent(folder, precision, place)
        return RecurrentBaseline(network, folder_tokenizer(folder), None, special_ids)
    loaded = open_model(what, precision, place, progress, keep_blocks=weights == "stored")
    model = Model(**vars(loaded), in_graph=fast is not False)
    if weights in ("int8", "int4"):
        pack_network(model.network, weights)
    if model.network.device.type == "cuda":
        reason = why_no_cuda_graph(model.network)  # a graph needs no preparation
    else:
        reason = (
            None if fast is False or accelerate(model.network, build=bool(fast)) else why_no_cpu_kernels(model.network)
        )
        if fast and is_packed(model.network) and kernel_library(build=True) is not None:
            reason = None  # its products, one by one
    if fast and reason:
        raise ClearheadError(f"there is no fast step for this model: {reason}")
    return model


def create(
    config: ModelConfig | str,
    tokenizer: Tokenizer | None = None,
    seed: int = 0,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
) -> Model:
    """A new model with random weights, from a config or the name of a preset; a seed gives the same on any device."""
    config, dtype = preset(config) if isinstance(config, str) else config, as_dtype(dtype)
    device = as_device(device, dtype)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed every GPU's too
        network = Transformer(config).eval()
    return Model(network.to(device=device, dtype=dtype), tokenizer)


def speculation_of(speculate: Speculation | Model | None) -> Speculation | None:
    return speculate.network if isinstance(speculate, Model) else speculate


def as_device(device: torch.device | str | None, dtype: torch.dtype | None = None) -> torch.device | None:
    """One that is here and has this precision, before a checkpoint is read for it."""
    if device is None:
        return None
    try:
        torch.empty(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ClearheadError(f"there is no device {str(device)!r} here; cpu always works") from None
    place = torch.device(device)
    if place.type == "mps" and dtype == torch.float64:
        raise ClearheadError("Apple's GPUs have no float64; float32 is the widest there")
    return place


def check_format(name: str) -> None:
    if name not in ("huggingface", "native"):
        raise unknown_name("format", name, ("huggingface", "native"))


def as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    name = str(dtype).removeprefix("torch.")
    if dtype is not None and name not in DTYPES:
        raise unknown_name("dtype", name, DTYPES)
    return DTYPES.get(name)
