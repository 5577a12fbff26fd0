"""Study: work, time and memory of generating n tokens with and without a key-value cache (book E1 to E4).

clearhead study cache
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clearhead.api import cost
from clearhead.architecture import Rope
from clearhead.cache import KeyValueCache, forward_hidden
from clearhead.model import Attention, Scoring, Transformer, reference_attention
from clearhead.studies.catalog import ENTRIES
from clearhead.studies.numbers import fit_slope, mean, spread_table
from clearhead.studies.pictures import COLORS, Figure, finish_axes, plot_spread
from clearhead.studies.study import Measurements, Run, Study, Table
from clearhead.studies.toys import build, toy_decoder

WIDTH, NUM_LAYERS, FLOAT_BYTES = 64, 2, 4
LENGTHS = (16, 32, 64, 128, 256, 512)
METHODS = {"without a cache": False, "with a cache": True}
COUNTS = ("scores", "projections")
EXPECTED = {"without a cache": {"scores": 3, "projections": 2}, "with a cache": {"scores": 2, "projections": 1}}


@dataclass
class _Counter:
    """Counts the scores q·k of one layer and head and the key projections of one layer, over a whole generation."""

    scores: int = 0
    projections: int = 0

    def kernel(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """Count every score, also those that the mask hides."""
        self.scores += q.shape[2] * k.shape[2]
        return reference_attention(q, k, v, scoring)

    def count_projection(self, module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        """Count the tokens whose keys a layer computes."""
        self.projections += inputs[0].shape[1]


@torch.inference_mode()
def _generate(network: Transformer, lengths: Sequence[int], cached: bool) -> Measurements:
    """Generate greedily from one token, and return counts, seconds and bytes when each of the lengths is reached."""
    counter, cache = _Counter(), KeyValueCache(network.config) if cached else None
    keys = [module.key for module in network.modules() if isinstance(module, Attention)]
    hooks = [key.register_forward_hook(counter.count_projection) for key in keys]
    found: Measurements = {"scores": [], "projections": [], "seconds": [], "bytes": []}
    tokens, start = torch.tensor([[1]]), time.perf_counter()
    for step in range(1, max(lengths) + 1):
        if cache is None:
            hidden = network.hidden_states(tokens, kernel=counter.kernel)
        else:
            hidden = forward_hidden(network, tokens[:, -1:], cache, kernel=counter.kernel)
        tokens = torch.cat((tokens, network.compute_logits(hidden[:, -1:]).argmax(dim=-1)), dim=1)
        if step in lengths:
            found["scores"].append(counter.scores // NUM_LAYERS)
            found["projections"].append(counter.projections // NUM_LAYERS)
            found["seconds"].append(time.perf_counter() - start)
            found["bytes"].append(0 if cache is None else cache.num_bytes)
    for hook in hooks:
        hook.remove()
    return found | {"tokens": tokens[0].tolist()}


def _measure(run: Run) -> Measurements:
    lengths = LENGTHS[:3] if run.smoke else LENGTHS
    config = toy_decoder(vocab_size=64, width=WIDTH, num_layers=NUM_LAYERS, context=max(lengths), position=Rope())
    network = build(config, run.seed).eval()
    _generate(network, lengths[:1], cached=False)  # the first call is slow
    found = {name: _generate(network, lengths, cached) for name, cached in run.each(METHODS.items(), lambda x: x[0])}
    predicted = cost(config, phase="decode", context=max(lengths), dtype="float32").cache_bytes_per_token
    return found | {"lengths": list(lengths), "predicted_bytes_per_token": predicted}


def _slopes(found: Measurements, quantity: str) -> dict[str, float]:
    """Return the exponents of the longer half of the lengths, where constants matter less."""
    half = len(found["lengths"]) // 2
    return {name: fit_slope(found["lengths"][half:], found[name][quantity][half:]) for name in METHODS}


def _holds(found: Measurements) -> bool:
    (plain, cached), slopes = (found[name] for name in METHODS), {count: _slopes(found, count) for count in COUNTS}
    exponents = all(abs(slopes[count][name] - EXPECTED[name][count]) < 0.05 for name in METHODS for count in COUNTS)
    memory = cached["bytes"] == [FLOAT_BYTES * 2 * length * WIDTH * NUM_LAYERS for length in found["lengths"]]
    predicted = found["predicted_bytes_per_token"] * found["lengths"][-1] == cached["bytes"][-1]
    faster = cached["seconds"][-1] < plain["seconds"][-1]
    return exponents and memory and predicted and faster and plain["tokens"] == cached["tokens"]


def _conclude(results: Sequence[Measurements]) -> str:
    scores, projections, seconds = (
        [mean([_slopes(found, quantity)[name] for found in results]) for name in METHODS]
        for quantity in (*COUNTS, "seconds")
    )
    ratio = mean([found["without a cache"]["seconds"][-1] / found["with a cache"]["seconds"][-1] for found in results])
    return (
        f"the same tokens; scores grow like n^{scores[0]:.2f} without and n^{scores[1]:.2f} with a cache, projections "
        f"like n^{projections[0]:.2f} and n^{projections[1]:.2f}, seconds like n^{seconds[0]:.2f} and "
        f"n^{seconds[1]:.2f}; {LENGTHS[-1]} tokens take {ratio:.1f} times as long without"
    )


def _tabulate(results: Sequence[Measurements]) -> Table:
    rows = {
        f"{length}, {name}": [[found[name][kind][index] for kind in (*COUNTS, "seconds", "bytes")] for found in results]
        for index, length in enumerate(results[0]["lengths"])
        for name in METHODS
    }
    return spread_table("n", ["scores per head", "key projections", "seconds", "bytes of cache"], rows, digits=4)


def _draw(figure: Figure, results: Sequence[Measurements]) -> None:
    titles = {"scores": "Scores of one head", "projections": "Key projections of one layer", "seconds": "Seconds"}
    for axes, (quantity, title) in zip(figure.subplots(1, 3), titles.items(), strict=True):
        for color, name in zip(COLORS, METHODS, strict=False):
            rows = [found[name][quantity] for found in results]
            slope = mean([_slopes(found, quantity)[name] for found in results])
            label = f"{name}: n^{slope:.2f}"
            plot_spread(axes, results[0]["lengths"], rows, label=label, color=color, marker="o")
        ticks = results[0]["lengths"]
        finish_axes(axes, title=title, x="generated tokens n", xscale="log", yscale="log", ticks=ticks)


STUDY = Study(
    entry=ENTRIES["cache"],
    claim="""Generating n tokens one by one computes n(n + 1)/2 key projections and O(n³) scores if every step reads
        the whole text again. With a cache these are n and O(n²) (E2, E3), and the tokens are the same. The cache
        holds 2·n·d numbers per layer, which is known in advance (E4).""",
    setup=f"""A network of {NUM_LAYERS} layers and width {WIDTH} generates {LENGTHS[-1]} tokens greedily, once by
        reading the whole text at every step and once with a cache. A kernel counts every score and a hook every
        projected token. Exponents are fitted to the longer half of the lengths.""",
    explanation="""Step t without a cache computes t queries times t keys, and the sum of t² is about n³/3. With a
        cache, only the new token is projected, and it attends to t keys; the sum of t is about n²/2. Earlier keys and
        values cannot change, because the causal mask keeps later tokens out of them, so the tokens are equal.""",
    limits="""Seconds grow more slowly than counts. At this size, most of a step is the fixed time of calling
        operations and, without a cache, the feed-forward layers, whose work grows like n²; the scores take over only
        for texts much longer than the width. The clock also measures whatever else the machine does.""",
    measure=_measure,
    holds=_holds,
    conclude=_conclude,
    tabulate=_tabulate,
    draw=_draw,
    figure_size=(12.0, 4.0),
)
