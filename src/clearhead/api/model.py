"""Model: a network with its tokenizer, and everything a user does with them.

    model = clearhead.load("smollm2"); print(model.generate("The capital of France is", max_new_tokens=8))

The options of generation are described in clearhead/options.py; generation/text_generator.py generates the texts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Self, Unpack

import torch

from clearhead.api.chat import Chat, check_message, encode_messages, require_chat_template
from clearhead.api.checks import FolderFormat, check_format, check_prompts, check_single
from clearhead.api.description import describe_network, name_execution
from clearhead.api.devices import DTYPES, resolve_device, resolve_dtype
from clearhead.api.interop import Interop
from clearhead.api.languages import choose_languages
from clearhead.api.progress import finished_texts_bar
from clearhead.api.speech_reader import SpeechReader
from clearhead.api.text_reader import TextReader
from clearhead.backends import is_packed
from clearhead.checkpoint import (
    check_save_folder,
    replace_folder,
    save_folder,
    save_native,
    save_sentence_pooler,
    save_tokenizer,
)
from clearhead.engine import Engine, EngineProvider, EngineSettings
from clearhead.errors import ClearheadError
from clearhead.generation import (
    Generation,
    Prompt,
    Score,
    Speculation,
    Stream,
    TextGenerator,
    check_can_score,
    encode_prompt,
    explain_out_of_memory,
    score,
)
from clearhead.home import expand_user
from clearhead.options import BeamOptions, GenerateKeywords, SamplingKeywords, SamplingOptions, documents_options

if TYPE_CHECKING:
    from clearhead.inspection import Trace


@dataclass(frozen=True, eq=False, repr=False)
class Model(TextReader, SpeechReader, Interop):
    """A network with its tokenizer: generate, ask, stream, chat, score, embed, classify, rerank, transcribe, trace."""

    use_cuda_graph: bool = True  # decode in one CUDA graph on an NVIDIA GPU, if the graph supports the model
    _engines: EngineProvider = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_engines", EngineProvider(self.network))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._description().values())})"

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><th>{name}</th><td>{escape(text)}</td></tr>" for name, text in self._description().items())
        return f"<table>{rows}</table>"

    def _description(self) -> dict[str, str]:
        """What repr shows: family, size, precision, device and which fast path runs, by name."""
        return describe_network(self.network, self.family) | {"execution": self._execution()}

    def _execution(self) -> str:
        """Name what runs a decode step: PyTorch, the CPU kernels or a CUDA graph."""
        return name_execution(self.network, self.use_cuda_graph)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.network.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights; computations with packed weights use this dtype."""
        return next(self.network.parameters()).dtype

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | str | None = None) -> Self:
        """Move the weights to a device, convert them to a dtype, or both, in place; return this model.

        device: "cpu", "cuda", "cuda:1", "mps", … None keeps the device.
        dtype: "float32", "bfloat16", "float16" or "float64". None keeps the dtype.
        """
        if isinstance(device, torch.dtype) or device in DTYPES:
            raise ClearheadError(f"{device} is a dtype; write to(dtype={str(device).removeprefix('torch.')!r})")
        dtype = resolve_dtype(dtype)
        device = resolve_device(device, dtype or self.dtype)
        self.network.to(device=device, dtype=dtype)
        if self.sentence is not None:
            self.sentence.to(device=device, dtype=dtype)
        return self

    @property
    def text_generator(self) -> TextGenerator:
        """The object that turns prompts into texts for `generate`, `stream` and `chat`."""
        return TextGenerator(self.network, self.tokenizer, self.special_ids, self.use_cuda_graph, self._engines)

    # --- generation

    @documents_options(SamplingOptions, BeamOptions)
    def generate(
        self,
        prompt: Prompt,
        *,
        beams: int | None = None,
        speculate: "Speculation | Model | None" = None,
        deterministic: bool | None = None,
        source_language: str | None = None,
        target_language: str | None = None,
        **options: Unpack[GenerateKeywords],
    ) -> Generation:
        """Continue a text or a list of token ids, or translate it with an encoder-decoder.

        The text is continued as it is, without the chat template. After a question, an instruction-tuned model may then
        stop at once; `ask` applies the chat template, so that it answers. str() of the result is the generated text.

        beams: number of beams. A beam search returns its best text instead of sampling; its options are
        max_new_tokens, stop_ids, length_penalty and stop_when. None: no beam search.
        speculate: "lookup", which drafts tokens by copying from the text, or a smaller model with the same vocabulary.
        Greedy decoding gives the same text and sampling has the same distribution, usually in less time.
        deterministic: True makes the text and its log-probabilities the same, to the last bit, as those of this prompt
        in `generate_many(..., deterministic=True)`. This is slow unless the CPU kernels run the model (docs/engine.md).
        source_language, target_language: the languages of a translation, for models with language tokens (mBART, NLLB).
        """
        check_single(options)
        generator, prompts = choose_languages(self.text_generator, [prompt], source_language, target_language)
        speculation = speculate.network if isinstance(speculate, Model) else speculate
        return generator.generate(
            prompts, 1, options, beams=beams, speculation=speculation, deterministic=deterministic
        )[0]

    @documents_options(SamplingOptions, BeamOptions)
    def ask(
        self,
        message: str,
        system: str | None = None,
        *,
        beams: int | None = None,
        speculate: "Speculation | Model | None" = None,
        **options: Unpack[GenerateKeywords],
    ) -> Generation:
        """Answer a message with the model's chat template. str() of the result is the answer.

        Raise ClearheadError if the model has no chat template; `generate` continues a text with any model.

        system: the system message, instructions for the answer. None uses the template's own, if it has one.
        beams, speculate: as for `generate`.
        """
        return self.generate(self.encode_chat(message, system), beams=beams, speculate=speculate, **options)

    def encode_chat(self, message: str, system: str | None = None) -> list[int]:
        """Return the token ids of a message in the chat template, as a prompt for `generate` or `stream`.

        Raise ClearheadError if the model has no chat template.
        """
        tokenizer = require_chat_template(self.text_generator)
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages.append({"role": "user", "content": message})
        for each in messages:
            check_message(each["content"])
        return encode_messages(tokenizer, messages)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model was trained to chat, so that `ask` and `chat` work."""
        template = None if self.tokenizer is None else self.tokenizer.chat_template
        return template is not None and self.config.decoder is not None and not self.config.is_encoder_decoder

    @documents_options(SamplingOptions, BeamOptions)
    def generate_many(
        self,
        prompts: Sequence[Prompt],
        n: int = 1,
        *,
        beams: int | None = None,
        speculate: "Speculation | Model | None" = None,
        deterministic: bool | None = None,
        source_language: str | None = None,
        target_language: str | None = None,
        progress: bool = False,
        **options: Unpack[GenerateKeywords],
    ) -> list[Generation]:
        """Continue several prompts at once and return n texts of each, in the order of the prompts.

        The engine processes prompts of different lengths in one batch (docs/engine.md).

        n: number of texts per prompt: samples, or the best beams of a beam search.
        beams, speculate: as for `generate`.
        deterministic: True makes each text the same, to the last bit, whatever the other prompts are; None does so
        where it costs nothing, in the CPU kernels.
        source_language, target_language: as for `generate`.
        progress: show a bar of the texts that are finished, on the standard error stream.
        """
        check_prompts(prompts)
        generator, prompts = choose_languages(self.text_generator, prompts, source_language, target_language)
        speculation = speculate.network if isinstance(speculate, Model) else speculate
        with finished_texts_bar(progress) as on_finish:
            return generator.generate(
                prompts,
                n,
                options,
                beams=beams,
                speculation=speculation,
                deterministic=deterministic,
                on_finish=on_finish,
            )

    @documents_options(SamplingOptions)
    def stream(
        self, prompt: Prompt, *, speculate: "Speculation | Model | None" = None, **options: Unpack[SamplingKeywords]
    ) -> Stream:
        """Return an iterator over the pieces of one generated text; its `generation` is the result so far.

        speculate: as for `generate`.
        """
        check_single(options)
        if "beams" in options:
            raise ClearheadError("a beam search has no text before it ends, so it cannot be streamed; use generate")
        speculation = speculate.network if isinstance(speculate, Model) else speculate
        return self.text_generator.stream(prompt, options, speculation)

    def chat(self, system: str | None = None) -> Chat:
        """Start a conversation that keeps its cache between turns: chat = model.chat(); chat.say("Hello").

        system: the system message.
        """
        return Chat(self.text_generator, system)

    def engine(self, **settings: Unpack[EngineSettings]) -> Engine:
        """Return an engine that generates the texts of many requests in one batch, for servers and evaluations.

        It keeps the keys and values of common prefixes from one request to the next, so the weights must not change.

        settings: memory, max_tokens, max_sequences, page_size and deterministic; see clearhead.engine.EngineSettings.
        """
        return Engine(self.network, **settings)

    # --- reading

    def trace(
        self, text: Prompt, source: Prompt | None = None, *, keep_heads: bool = False, keep_residuals: bool = False
    ) -> "Trace":
        """Run one forward pass over a text and return its trace: trace.attention(layer, head), trace.logits, …

        source: the input of the encoder, which an encoder-decoder needs; `text` is then the input of the decoder.
        keep_heads: compute the queries, keys and values of all layers now and keep them, instead of on request.
        keep_residuals: keep the residual stream at every depth, so that reading all layers repeats no forward pass.
        """
        from clearhead.inspection import trace_text  # imported here because most programs never trace

        return trace_text(self.text_generator, text, source, keep_heads=keep_heads, keep_residuals=keep_residuals)

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a text. A prompt that already consists of token ids is returned as a list."""
        return encode_prompt(prompt, self.tokenizer)

    def score(self, text: Prompt) -> Score:
        """Return the log-probability of each token given those before it, and the perplexity of the text."""
        check_can_score(self.config)
        with explain_out_of_memory():
            return score(self.network, self.encode(text))

    # --- saving

    def save(self, folder: str | Path, format: FolderFormat = "native") -> Path:
        """Save to a folder that `clearhead.load` reads; transformers also reads it if the format is "huggingface".

        `clearhead.api.save_gguf` writes a file for llama.cpp.

        The new model replaces an old one in one step: an interrupted save leaves the old one. Other files in the folder
        stay.
        """
        check_format(format)
        folder = expand_user(folder)
        if format != "native" and is_packed(self.network):
            raise ClearheadError("packed weights can only be saved as native; load the model with full weights instead")
        check_save_folder(folder, format, self.tokenizer)
        with replace_folder(folder) as staged:
            if format == "huggingface":
                save_folder(self.network, staged, self.family, self.special_ids, self.labels, self.speech)
            else:
                family = self.family.name if self.family else None
                save_native(self.network, staged, family, self.special_ids, self.labels, self.speech)
            save_sentence_pooler(self.sentence, staged)
            if self.tokenizer is not None:
                save_tokenizer(self.tokenizer, staged, self.network.config)
        return folder
