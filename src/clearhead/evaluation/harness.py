"""An adapter that runs a model in lm-evaluation-harness, with every task written for it.

    import clearhead.evaluation.harness
    lm_eval.simple_evaluate(model="clearhead", model_args="model=smollm2", tasks=["sciq"], limit=50)

    python -m clearhead.evaluation.harness --model clearhead --model_args model=smollm2 --tasks sciq

Importing this module registers the name "clearhead" in the harness, which finds models only by what has been imported:
run as a program, the module is the command `lm_eval` with this name added.

Texts are tokenized, truncated to the context and split into windows as the harness's own `hf` model does. This is the
only module that imports the harness; without it, importing this module raises an error that says how to install it.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from clearhead.api import Model, load
from clearhead.errors import ClearheadError
from clearhead.evaluation.engine_likelihood import log_likelihoods_in_engine
from clearhead.evaluation.likelihood import (
    BATCH_TOKENS,
    Likelihood,
    Request,
    encode_request,
    log_likelihoods,
    start_token,
)
from clearhead.generation import check_can_score, require_tokenizer

try:
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError:
    _MISSING = "the adapter needs lm-evaluation-harness; run: pip install lm_eval"
    if __name__ == "__main__":
        raise SystemExit(f"error: {_MISSING}") from None
    raise ClearheadError(_MISSING) from None

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

MAX_NEW_TOKENS = 256  # the default of the harness
BATCH_SIZE = 16
_SHARED_OPTIONS = ("temperature", "top_k", "top_p")  # options with the same name in the harness and here


@register_model("clearhead")
class ClearheadLM(LM):  # type: ignore[misc]  # the harness has no type annotations
    """A model as lm-evaluation-harness calls it.

    model: a model, or what `clearhead.load` loads. dtype, device and weights are arguments of `load`; without a GPU,
    the harness's default cuda:0 means the CPU. batch_tokens: tokens of a batch of log-likelihoods. batch_size: texts
    that are generated together; "auto" means 16. max_batch_size, which the harness passes along with it, is not used.
    deterministic: compute log-likelihoods in the engine, with the bits that a server's API returns (docs/engine.md).
    """

    def __init__(
        self,
        model: Model | str,
        batch_tokens: int = BATCH_TOKENS,
        *,
        dtype: str | None = None,
        device: str | None = None,
        weights: Any = "full",
        deterministic: bool = False,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if device == "cuda:0" and not torch.cuda.is_available():
            device = None
        if not isinstance(model, Model):
            model = load(model, dtype=dtype, device=device, weights=weights)
        elif dtype is not None or device is not None or weights != "full":
            raise ClearheadError("dtype, device and weights apply only to a model given by name; use model.to instead")
        check_can_score(model.config)
        self.model, self.tokenizer, self.batch_tokens = model, require_tokenizer(model.tokenizer), int(batch_tokens)
        self.engine = model.engine(deterministic=True) if deterministic else None
        self.generation_batch_size = BATCH_SIZE if batch_size in (None, "auto") else int(batch_size)

    def loglikelihood(self, requests: "list[Instance]") -> list[tuple[float, bool]]:
        """Return log p of each continuation after its context, and whether greedy decoding generates it."""
        texts = [request.args for request in requests]
        encoded = [encode_request(context, continuation, self.tokenizer) for context, continuation in texts]
        likelihoods = self.likelihoods([request.truncate(self.max_tokens) for request in encoded])
        return [(likelihood.logprob, likelihood.is_greedy) for likelihood in likelihoods]

    def loglikelihood_rolling(self, requests: "list[Instance]") -> list[float]:
        """Return log p of each whole text, read in windows that overlap as little as possible."""
        windows_of_texts = [self.windows(*request.args) for request in requests]
        all_windows = [window for windows in windows_of_texts for window in windows]
        likelihoods = iter(self.likelihoods(all_windows))
        return [math.fsum(one.logprob for one in islice(likelihoods, len(windows))) for windows in windows_of_texts]

    @property
    def max_tokens(self) -> int:
        """Number of tokens that are read for one log-likelihood. The engine also reads the last one it scores."""
        return self.model.config.context - (0 if self.engine is None else 1)

    def likelihoods(self, requests: Sequence[Request]) -> list[Likelihood]:
        """Return the log-probabilities of continuations."""
        if self.engine is not None:
            return log_likelihoods_in_engine(self.engine, requests)
        return log_likelihoods(self.model.network, requests, self.batch_tokens)

    def windows(self, text: str) -> list[Request]:
        """Return the windows of a text as requests."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        windows = get_rolling_token_windows(ids, start_token(self.tokenizer), self.max_tokens, context_len=1)
        return [Request(tuple(context), tuple(scored)) for context, scored in map(make_disjoint_window, windows)]

    def generate_until(self, requests: "list[Instance]") -> list[str]:
        """Generate a text after each context, up to a stop string; requests with equal options share batches."""
        texts: dict[int, str] = {}
        by_options: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            by_options.setdefault(repr(request.args[1]), []).append(index)
        for indices in by_options.values():
            options = _generation_options(requests[indices[0]].args[1])
            for start in range(0, len(indices), self.generation_batch_size):
                batch = indices[start : start + self.generation_batch_size]
                prompts = [self.prompt(requests[index].args[0], options["max_new_tokens"]) for index in batch]
                generations = self.model.generate_many(prompts, **options)
                texts |= {index: generation.text for index, generation in zip(batch, generations, strict=True)}
        return [texts[index] for index in range(len(requests))]

    def prompt(self, text: str, num_new_tokens: int) -> Sequence[int]:
        """Return the end of a text that leaves space for `num_new_tokens` in the context."""
        max_tokens = self.model.config.context - num_new_tokens
        if max_tokens < 1:
            raise ClearheadError(
                f"a task requests {num_new_tokens} new tokens, but the context of this model is "
                f"{self.model.config.context}"
            )
        return self.tokenizer.encode(text)[-max_tokens:]


def _generation_options(task_options: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the options of a task. Raise ClearheadError for one that is not supported."""
    remaining = dict(task_options)
    stop = remaining.pop("until", None) or []
    options = {"stop": stop, "max_new_tokens": remaining.pop("max_gen_toks", MAX_NEW_TOKENS)}
    samples = remaining.pop("do_sample", float(remaining.get("temperature", 0)) > 0)
    sampling = {name: remaining.pop(name) for name in _SHARED_OPTIONS if name in remaining}
    if remaining:
        raise ClearheadError(f"a task requests {', '.join(remaining)}, which Clearhead does not support")
    return options | ({"temperature": 1.0, "seed": 0} | sampling if samples else {})


def main() -> None:
    """Run the harness's own command, in which `--model clearhead` is known."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
