"""RecurrentBaseline: the recurrent encoder-decoder with the interface of Model.

model = clearhead.load("runs/rnn/model"); print(model.generate("Hello"))
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from clearhead.api.checks import FolderFormat, check_prompts, check_single
from clearhead.api.languages import check_no_languages
from clearhead.api.model import Model
from clearhead.architecture import ModelConfig
from clearhead.errors import ClearheadError
from clearhead.generation import Generation, Prompt, Speculation, TextGenerator, translate
from clearhead.model import RecurrentTranslator
from clearhead.options import GenerateKeywords, SamplingOptions

if TYPE_CHECKING:
    from clearhead.inspection import RecurrentTrace


@dataclass(frozen=True, repr=False)
class RecurrentBaseline(Model):
    """A recurrent encoder-decoder. It generates greedily, traces its alignment and can be saved; nothing else works.

    It is a Model only so that `clearhead.load` can return it and tools can tell the user what it does not support.
    """

    network: RecurrentTranslator  # type: ignore[assignment]  # its config is network.config

    @property
    def config(self) -> ModelConfig:
        raise ClearheadError("this model is a recurrent network; it can only generate, trace and be saved")

    @property
    def text_generator(self) -> TextGenerator:
        raise ClearheadError(
            "this model is a recurrent network, which does not support ask, stream and chat; use generate"
        )

    @property
    def has_chat_template(self) -> bool:
        """False: a recurrent network translates, it does not chat."""
        return False

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
        """Translate a text or token ids, with the most likely token at each step; the only option is max_new_tokens."""
        check_single(options)
        check_no_languages(source_language, target_language)
        return self.generate_many([prompt], beams=beams, speculate=speculate, deterministic=deterministic, **options)[0]

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
        """Translate several texts in one batch; the only option is max_new_tokens. All texts finish together."""
        check_prompts(prompts)
        check_no_languages(source_language, target_language)
        max_new_tokens = options.get("max_new_tokens", SamplingOptions.max_new_tokens)
        SamplingOptions(max_new_tokens=max_new_tokens)  # raises ClearheadError for an invalid value
        is_greedy = n == 1 and beams is None and speculate is None and options.get("temperature") in (None, 0)
        is_greedy = is_greedy and not deterministic
        if not is_greedy or options.keys() - {"max_new_tokens", "temperature"}:
            raise ClearheadError(
                "a recurrent network always takes the most likely token; its only option is max_new_tokens"
            )
        sources = [self.encode(prompt) for prompt in prompts]
        start_id = self.special_ids["decoder_start_token_id"]
        stop_id = self.special_ids["eos_token_id"]
        answers = translate(self.network, sources, start_id=start_id, stop_ids={stop_id}, max_new_tokens=max_new_tokens)
        return [self._generation(*pair, stop_id) for pair in zip(sources, answers, strict=True)]

    def trace(  # type: ignore[override]  # a recurrent network has no residual streams, so this is another trace
        self, text: Prompt, source: Prompt | None = None, *, keep_heads: bool = False
    ) -> "RecurrentTrace":
        """Run one forward pass and return the alignment of the answer `text` with `source`, which the encoder reads."""
        from clearhead.inspection import trace_recurrent  # imported here because most programs never trace

        if source is None:
            raise ClearheadError("an encoder-decoder needs a source; the text is only the input of its decoder")
        end = self.special_ids.get("eos_token_id")
        answer = [token for token in self.encode(text) if token != end]
        tokens = [self.special_ids["decoder_start_token_id"], *answer]
        return trace_recurrent(self.network, self.encode(source), tokens, self.tokenizer)

    def save(self, folder: str | Path, format: FolderFormat = "native") -> Path:
        """Save to a folder that `clearhead.load` reads."""
        if format == "huggingface":
            raise ClearheadError("transformers cannot load this recurrent network; save it with format 'native'")
        return super().save(folder, format)

    def _execution(self) -> str:
        return "PyTorch"

    def _generation(self, source: list[int], answer: list[int], stop_id: int) -> Generation:
        words = [token for token in answer if token != stop_id]
        text = "" if self.tokenizer is None else self.tokenizer.decode(words)
        return Generation(answer, text, source, "stop" if answer[-1:] == [stop_id] else "length")
