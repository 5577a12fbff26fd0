"""RecurrentBaseline: the recurrent encoder-decoder behind the interface of Model.

model = clearhead.load("runs/rnn/model"); print(model.generate("Hello"))
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from clearhead.api.model import Model, check_prompts
from clearhead.architecture import ModelConfig
from clearhead.errors import ClearheadError
from clearhead.generation import Generation, Prompt, TextGenerator, translate
from clearhead.model import RecurrentTranslator
from clearhead.options import SamplingOptions


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
