"""Worked examples of part E of the book: generation, the cache, what it saves and what it holds (E1 to E4).

for example in generation_examples(): print(example.title)
"""

import math

import torch

from clearhead.api import load
from clearhead.cache import ContiguousStore
from clearhead.costs import cache_bytes_per_token
from clearhead.course.parts import (
    Chart,
    Example,
    Panel,
    Part,
    TextTable,
    attend_with_scores,
    causal_context,
    inputs,
    numbered,
    single_head,
    step_context,
    tensor,
)
from clearhead.families import preset

_LENGTHS = (1, 4, 16, 64, 256)
_CACHES = ("gpt2", "llama-7b", "llama-3.1-8b", "palm-540b", "deepseek-v3")
_CONTEXT = 4096


def generation_examples() -> list[Example]:
    """Compute the examples of E1 to E4."""
    return [_token_by_token(), _cached_decoding(), _key_projections(), _growth(), _cache_memory()]


def _token_by_token() -> Example:
    """Generate with the bundled model that spells out pronunciations, and list the likeliest tokens of each step."""
    word = inputs("generate")["word"]
    model = load("g2p", fast=False)  # six tokens are not worth compiling kernels for
    assert model.tokenizer is not None
    result = model.generate(word, temperature=0.0, logprobs=3, max_new_tokens=16)
    rows, text = [], []
    for number, (token, likely) in enumerate(zip(result.tokens, result.top_logprobs or [], strict=True), 1):
        shown = [f"{_name(model.tokenizer.decode([each]))} {math.exp(log):.3f}" for each, log in likely.items()]
        text.append(model.tokenizer.decode([token]))
        rows.append((str(number), *shown[:3], "".join(text)))
    explanation = (
        f"A small encoder-decoder of this package reads “{word}” and writes its pronunciation. Each step computes new "
        "probabilities, given what was chosen before; greedy decoding takes the first column."
    )
    columns = ("step", "likeliest", "second", "third", "text so far")
    return Example("E1", "Token by token", explanation, [TextTable("probabilities of each step", columns, rows)])


def _name(text: str) -> str:
    return text if text.strip() else "end"


def _cached_decoding() -> Example:
    matrices = {name: tensor(rows) for name, rows in inputs("cache").items()}
    attention, x = single_head(matrices["W_q"], matrices["W_k"], matrices["W_v"]), matrices["x"][None]
    count = x.shape[1]
    tokens = numbered("token", count)
    store, outputs = ContiguousStore(), []
    panels = [Panel("x", matrices["x"], rows=tokens)]
    panels += [Panel(name, matrices[name]) for name in ("W_q", "W_k", "W_v")]
    for step in range(count):
        token = x[:, step : step + 1]
        q = attention.project(attention.query, token, num_heads=1)[0, 0]
        outputs.append(attention(token, step_context(step, store))[0])
        cached = torch.cat([buffer[0, 0, : step + 1] for buffer in store.tensors().values()], dim=-1)
        steps = attend_with_scores(q @ cached[:, :2].T, scale=attention.scale)
        panels += [
            Panel(f"q of token {step + 1}", q),
            Panel(f"cache after token {step + 1}", cached, tokens[: step + 1], ("k", "k", "v", "v")),
            Panel(f"scores of token {step + 1}: q·kᵀ/√2", steps.scores[0, 0], columns=tokens[: step + 1]),
            Panel(f"weights of token {step + 1}", steps.weights[0, 0], columns=tokens[: step + 1], kind="weights"),
            Panel(f"output of token {step + 1}", outputs[-1]),
        ]
    one_pass = attention(x, causal_context(count))[0]
    panels += [
        Panel("outputs, token by token", torch.cat(outputs), rows=tokens),
        Panel("outputs, in one pass", one_pass, rows=tokens),
    ]
    explanation = (
        "Each token is projected once. Its key and value are stored in the cache, and later queries attend to all "
        "cached keys. The outputs equal those of one pass over the whole text."
    )
    return Example("E2", "Decoding with a cache", explanation, panels)


def _key_projections() -> Example:
    lengths = inputs("projections")["num_tokens"]
    attention = single_head(*(tensor(inputs("cache")[name]) for name in ("W_q", "W_k", "W_v")))
    projected: list[int] = []
    attention.key.register_forward_hook(lambda module, inputs, output: projected.append(inputs[0].shape[1]))

    def count_projections(length: int, cached: bool) -> int:
        projected.clear()
        store = ContiguousStore() if cached else None
        for step in range(length):
            x = torch.zeros(1, 1 if cached else step + 1, 2, dtype=torch.float64)
            attention(x, step_context(step, store))
        return sum(projected)

    counts = tensor([[count_projections(length, cached) for length in lengths] for cached in (False, True)])
    columns = [f"{length} token{'s' * (length > 1)}" for length in lengths]
    explanation = "Key projections in one layer to generate a text: without a cache, every prefix is projected again."
    panel = Panel("key projections", counts, ("without a cache", "with a cache"), columns)
    return Example("E2", "What a cache saves", explanation, [panel])


def _growth() -> Example:
    """Count scores q·k of one layer: a pass over t tokens computes t² of them, a cached step t."""
    scores = {
        "without a cache": [sum(step * step for step in range(1, n + 1)) for n in _LENGTHS],
        "with a cache": [sum(range(1, n + 1)) for n in _LENGTHS],
    }
    columns = [f"n = {n}" for n in _LENGTHS]
    panels: list[Part] = [
        Panel("scores computed in one layer", tensor(list(scores.values())), list(scores), columns, num_digits=8),
        Chart("scores over n", _LENGTHS, dict(scores), x_label="n", log_x=True, log_y=True),
    ]
    explanation = (
        "Generating n tokens. Without a cache, step t computes all t² scores again: n(n + 1)(2n + 1)/6 in total, "
        "O(n³). With a cache, one query meets t keys: n(n + 1)/2, O(n²). In a log-log picture the slopes are 3 and 2."
    )
    return Example("E3", "Scores with and without a cache", explanation, panels)


def _cache_memory() -> Example:
    rows = []
    for name in _CACHES:
        config = preset(name)
        context = min(_CONTEXT, config.context)
        layers = config.decoder.layers if config.decoder else ()
        formula = 2 * config.width * len(layers) * 2
        per_token = cache_bytes_per_token(config, bytes_per_element=2)
        rows.append((name, f"{formula:,}", f"{per_token:,}", f"{formula / per_token:.3g}×", f"{per_token * context:,}"))
    columns = ("preset", "2·d·L numbers, bytes per token", "its cache, bytes per token", "saving", "bytes in total")
    explanation = (
        f"Two bytes per number (bfloat16), up to {_CONTEXT} tokens. The formula 2·n·d·L is exact for multi-head "
        "attention whose heads are d wide together; grouped and multi-query attention share keys and values, and "
        "DeepSeek stores a latent vector. PaLM saves 72 times and not 48 times, the number of its heads, because they "
        "are 48·256 = 12,288 wide together, and d is 18,432."
    )
    return Example("E4", "Bytes of a cache", explanation, [TextTable("caches", columns, rows)])
