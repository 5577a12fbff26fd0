"""Study: every model of the book's table at toy size: built, trained for 60 steps, cached and plain (book C1 to C5).

clearhead study models
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from clearhead.cache import KeyValueCache, forward_step
from clearhead.config import config_changes
from clearhead.families import TinySizes, preset, shrink
from clearhead.model import EncoderOutput, Transformer
from clearhead.studies.catalog import ENTRIES
from clearhead.studies.numbers import mean, spread
from clearhead.studies.pictures import COLORS, Figure, finish_axes, plot_spread
from clearhead.studies.study import Measurements, Run, Study, Table
from clearhead.studies.toys import build, cross_entropy, english_text, random_generator, text_rows, train

NUM_STEPS, LENGTH, BATCH, SOURCE = 60, 32, 8, 12
MODELS = {  # preset -> the older model that it is compared with, and what is new in it
    "transformer-base": (None, "sinusoids, attention in an encoder and a decoder, post-norm"),
    "gpt1": ("transformer-base", "a decoder alone, learned positions"),
    "gpt2": ("gpt1", "norms before the branches, a final norm"),
    "gpt3-175b": ("gpt2", "banded attention in every second layer"),
    "gopher-280b": ("gpt2", "relative positions, RMS norm"),
    "palm-540b": ("gpt2", "RoPE, one key-value head, SwiGLU, parallel branches, no biases"),
    "llama-7b": ("palm-540b", "RMS norm, branches one after the other"),
    "llama-2-70b": ("llama-7b", "grouped-query attention"),
    "llama-3.1-8b": ("llama-2-70b", "a larger base of RoPE, scaled frequencies"),
    "grok-1": ("llama-2-70b", "mixture of experts, capped scores, norms around the branches"),
    "grok-2": ("grok-1", "a shared expert, temperature for long texts"),
    "deepseek-v2": ("llama-2-70b", "latent attention with decoupled RoPE, many small experts"),
    "deepseek-v3": ("deepseek-v2", "sigmoid router with groups and a balancing bias"),
    "llama-4-scout": ("llama-3.1-8b", "iRoPE: RoPE in chunks, every fourth layer without positions; experts"),
    "qwen3-0.6b": ("llama-3.1-8b", "norms of queries and keys"),
    "gemma-3-1b": ("llama-3.1-8b", "five sliding windows per global layer, norms around the branches"),
}


def _inputs(network: Transformer, rows: Tensor) -> tuple[EncoderOutput | None, Tensor, Tensor]:
    """Return the encoder output, the decoder's inputs and its targets. An encoder reads the first characters."""
    if not network.config.is_encoder_decoder:
        return None, rows[:, :-1], rows[:, 1:]
    return network.encode(rows[:, :SOURCE]), rows[:, SOURCE - 1 : -1], rows[:, SOURCE:]


def _loss(network: Transformer, rows: Tensor) -> Tensor:
    encoder_output, inputs, targets = _inputs(network, rows)
    return cross_entropy(network.compute_logits(network.hidden_states(inputs, encoder_output=encoder_output)), targets)


@torch.no_grad()
def _cache_error(network: Transformer, rows: Tensor) -> float:
    """Return the largest difference between the logits of one pass and those of a cache, token by token."""
    encoder_output, inputs, _ = _inputs(network, rows)
    plain = network.compute_logits(network.hidden_states(inputs, encoder_output=encoder_output))
    cache = KeyValueCache(network.config)
    steps = [forward_step(network, token, cache, encoder_output=encoder_output) for token in inputs.split(1, dim=1)]
    return float((torch.stack(steps, dim=1) - plain).abs().max())


def _measure(run: Run) -> Measurements:
    text, vocab_size = english_text()
    sizes = TinySizes(vocab_size=vocab_size, width=32, head_width=8, feed_forward=64, expert=64, context=64)
    found: Measurements = {"curves": {}, "cache_error": {}, "parameters": {}, "changes": {}}
    for name in run.each(MODELS):
        config = shrink(preset(name), sizes)
        network = build(config, run.seed)

        def loss_of(step: int, network: Transformer = network) -> Tensor:
            return _loss(network, text_rows(text, BATCH, LENGTH, random_generator(run.seed, step)))

        found["curves"][name] = train(network, loss_of, num_steps=run.size(NUM_STEPS, 2), learning_rate=5e-3)
        rows = text_rows(text, 2, LENGTH, random_generator(run.seed, -1))
        found["cache_error"][name] = _cache_error(network.double(), rows)
        found["parameters"][name] = sum(parameter.numel() for parameter in network.parameters())
        older = MODELS[name][0]
        found["changes"][name] = [] if older is None else config_changes(shrink(preset(older), sizes), config)
    return found


def _holds(found: Measurements) -> bool:
    learns = all(curve[-1] < 0.8 * curve[0] for curve in found["curves"].values())
    return learns and all(error < 1e-9 for error in found["cache_error"].values())


def _last_loss(found: Measurements, name: str) -> float:
    return mean(found["curves"][name][-10:])


def _conclude(results: Sequence[Measurements]) -> str:
    losses = {name: mean([_last_loss(found, name) for found in results]) for name in MODELS}
    error = max(max(found["cache_error"].values()) for found in results)
    return (
        f"all {len(MODELS)} models learn: after {NUM_STEPS} steps their losses are {min(losses.values()):.2f} to "
        f"{max(losses.values()):.2f}; cached and plain logits differ by at most {error:.0e}"
    )


def _tabulate(results: Sequence[Measurements]) -> Table:
    rows = [
        (
            name,
            older or "",
            news,
            str(len(results[0]["changes"][name])),
            f"{results[0]['parameters'][name]:,}",
            spread([_last_loss(found, name) for found in results]),
            f"{max(found['cache_error'][name] for found in results):.0e}",
        )
        for name, (older, news) in MODELS.items()
    ]
    headings = ("compared with", "what is new", "settings changed", "parameters", "loss", "cached − plain")
    return Table(("model at toy size", *headings), rows)


def _draw(figure: Figure, results: Sequence[Measurements]) -> None:
    grid = figure.subplots(4, 4, sharex=True, sharey=True).flatten()
    for axes, name in zip(grid, MODELS, strict=True):
        rows = [found["curves"][name] for found in results]
        plot_spread(axes, range(len(rows[0])), rows, label=name, color=COLORS[0], linewidth=1)
        finish_axes(axes, title=f"{name}: {mean([_last_loss(found, name) for found in results]):.2f}", legend=False)
        axes.text(0.97, 0.95, MODELS[name][1].replace(", ", "\n").replace("; ", "\n"), transform=axes.transAxes,
                  ha="right", va="top", fontsize=6.5, color="#444444")  # fmt: skip
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("loss (nats per character)", fontsize=9)


STUDY = Study(
    entry=ENTRIES["models"],
    claim="""The models of the book's table differ in positions, norms, attention and feed-forward layers, and all
        are Transformers (C5): the same blocks (C1) in a decoder (C2) or an encoder-decoder (C3).""",
    setup=f"""Each preset is shrunk to a width of 32 and at most eight layers, with every choice of its layers kept,
        and trains for {NUM_STEPS} steps on English characters. Then the logits of one pass are compared, in double
        precision, with those of a cache that reads token by token. table.json lists every setting in which a model
        differs from its predecessor. `clearhead create NAME --tiny` writes such a model.""",
    explanation="""One network computes all of them: a model is a config. The list of changed settings is therefore
        the whole difference between two models at this size.""",
    limits="""Toy sizes and 60 steps show that every architecture works and learns, not which is better: losses here
        depend on initial weights and learning rate more than on the architecture. The Transformer of 2017 reads the
        first characters in its encoder, so its loss is that of another task.""",
    measure=_measure,
    holds=_holds,
    conclude=_conclude,
    tabulate=_tabulate,
    draw=_draw,
    figure_size=(12.0, 10.0),
)
