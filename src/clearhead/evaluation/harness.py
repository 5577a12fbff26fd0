"""A model as lm-evaluation-harness asks for it, so that every task written for the harness runs here.

    from clearhead.evaluation.harness import ClearheadLM
    lm_eval.simple_evaluate(model=ClearheadLM(clearhead.load("smollm2")), tasks=["sciq"], limit=50)

Texts are divided into tokens, cut to the context and rolled over as its `hf` model does. It is the only file that
imports the harness; without it, importing this file says how to get it.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from clearhead.api import Model
from clearhead.errors import ClearheadError
from clearhead.evaluation.likelihood import (
    BATCH_TOKENS,
    Request,
    check_reads_alone,
    encode_pair,
    first_id,
    log_likelihoods,
)
from clearhead.generation import require_tokenizer

try:
    from lm_eval.api.model import LM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError:
    raise ClearheadError("the adapter needs lm-evaluation-harness: pip install lm_eval") from None

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

MAX_NEW_TOKENS = 256  # what the harness takes where a task does not say
BATCH_SIZE = 16
SAME_NAME = ("temperature", "top_k", "top_p")


class ClearheadLM(LM):  # type: ignore[misc]  # the harness carries no types
    def __init__(self, model: Model, batch_tokens: int = BATCH_TOKENS) -> None:
        super().__init__()
        check_reads_alone(model.config)
        self.model, self.tokenizer, self.batch_tokens = model, require_tokenizer(model.tokenizer), batch_tokens

    def loglikelihood(self, requests: "list[Instance]") -> list[tuple[float, bool]]:
        """log p of each continuation after its context, and whether greedy decoding writes it."""
        texts = [request.args for request in requests]
        pairs = [encode_pair(context, continuation, self.tokenizer) for context, continuation in texts]
        cut = [pair.within(self.model.config.context) for pair in pairs]
        found = log_likelihoods(self.model.network, cut, self.batch_tokens)
        return [(one.logprob, one.is_greedy) for one in found]

    def loglikelihood_rolling(self, requests: "list[Instance]") -> list[float]:
        """log p of each whole text, through windows that do not overlap more than they must."""
        rolled = [self.windows(*request.args) for request in requests]
        every = [window for windows in rolled for window in windows]
        found = iter(log_likelihoods(self.model.network, every, self.batch_tokens))
        return [math.fsum(one.logprob for one in islice(found, len(windows))) for windows in rolled]

    def windows(self, text: str) -> list[Request]:
        ids, beginning = self.tokenizer.encode(text, add_special_tokens=False), first_id(self.tokenizer)
        rolled = get_rolling_token_windows(ids, beginning, self.model.config.context, context_len=1)
        return [Request(tuple(context), tuple(scored)) for context, scored in map(make_disjoint_window, rolled)]

    def generate_until(self, requests: "list[Instance]") -> list[str]:
        """What the model writes after each context, up to a stop string; those with equal options go together."""
        texts: dict[int, str] = {}
        alike: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            alike.setdefault(repr(request.args[1]), []).append(number)
        for numbers in alike.values():
            options = generation_options(requests[numbers[0]].args[1])
            for start in range(0, len(numbers), BATCH_SIZE):
                batch = numbers[start : start + BATCH_SIZE]
                prompts = [self.prompt(requests[number].args[0], options["max_new_tokens"]) for number in batch]
                made = self.model.generate_many(prompts, **options)
                texts |= {number: one.text for number, one in zip(batch, made, strict=True)}
        return [texts[number] for number in range(len(requests))]

    def prompt(self, text: str, num_new: int) -> Sequence[int]:
        """The end of the text that leaves room for `num_new` tokens."""
        room = self.model.config.context - num_new
        if room < 1:
            raise ClearheadError(f"a task asks for {num_new} tokens; this model reads {self.model.config.context}")
        return self.tokenizer.encode(text)[-room:]


def generation_options(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Ours for those of a task; one that has no equal here is refused."""
    given = dict(asked)
    stop = given.pop("until", None) or []
    options = {"stop": stop, "max_new_tokens": given.pop("max_gen_toks", MAX_NEW_TOKENS)}
    samples = given.pop("do_sample", float(given.get("temperature", 0)) > 0)
    chosen = {name: given.pop(name) for name in SAME_NAME if name in given}
    if given:
        raise ClearheadError(f"a task asks for {', '.join(given)}, which has no equal here")
    return options | ({"temperature": 1.0, "seed": 0} | chosen if samples else {})
