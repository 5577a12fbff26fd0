"""How a run ends: well, with a model, a picture and a sample; or at numbers that are no numbers, with the batch shown.

finish(recipe, setup, learner, Path("runs/x"), display)
"""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from clearhead.bundle import Model
from clearhead.data.batch import Batch
from clearhead.errors import ClearheadError
from clearhead.model.transformer import Transformer
from clearhead.tokenization.base import Tokenizer
from clearhead.training.curve import draw_curve
from clearhead.training.display import Display
from clearhead.training.learner import Learner
from clearhead.training.lora import add_lora, merge_lora
from clearhead.training.recipe import Recipe
from clearhead.training.setup import Setup
from clearhead.training.state import restore_weights

SAMPLE_TOKENS, SHOWN_CHARACTERS = 256, 200


def refuse(step: int, loss: float, norm: float, batch: Batch, tokenizer: Tokenizer, folder: Path) -> None:
    """Stop before the update where loss or gradient is not finite; the batch is written down."""
    if math.isfinite(loss) and math.isfinite(norm):
        return
    path = folder / f"bad-batch-{step}.txt"
    read = batch.tokens if batch.source is None else batch.source
    rows = [tokenizer.decode(row, skip_special_tokens=False) for row in read.tolist()]
    answers = [[token for token in row if token >= 0] for row in batch.targets.tolist()]
    asked = [tokenizer.decode(row, skip_special_tokens=False) for row in answers]
    pairs = zip(rows, asked, strict=True)
    path.write_text("\n".join(f"reads: {row!r}\nasked: {answer!r}\n" for row, answer in pairs), encoding="utf-8")
    raise ClearheadError(
        f"at step {step} the loss is {loss} and the gradient's length {norm}; nothing was updated, and the last "
        f"checkpoint stands. The batch is in {path} and begins {rows[0][:SHOWN_CHARACTERS]!r}"
    )


def finish(recipe: Recipe, setup: Setup, learner: Learner, folder: Path, display: Display) -> None:
    """All processes call it, the main one writes."""
    learner.finish()
    network = whole_network(recipe, learner)
    if not learner.world.is_main:
        return
    try:
        draw_curve(folder)
    except ClearheadError as error:
        display.say(f"no picture of the loss: {error}")
    if network is None:
        display.say("a recurrent network is not saved as a model; its weights are in the last checkpoint")
        return
    model = Model(network.eval(), setup.tokenizer, setup.family, setup.special_ids)
    model.save(folder / "model")
    (folder / "sample.txt").write_text("\n\n".join(samples(model, recipe, setup)) + "\n", encoding="utf-8")
    display.say(f"model: {folder / 'model'}")


def whole_network(recipe: Recipe, learner: Learner) -> Transformer | None:
    """The trained network on the CPU of the main process, put together from its slices, additions merged."""
    network = learner.network
    weights = learner.world.gather_weights(dict(network.named_parameters()) | dict(network.named_buffers()))
    if not learner.world.is_main or not isinstance(network, Transformer):
        return None
    whole = Transformer(network.config)
    if recipe.lora is not None:
        add_lora(whole, replace(recipe.lora, dropout=None))
    restore_weights(dict(whole.named_parameters()) | dict(whole.named_buffers()), weights)
    merge_lora(whole)
    return whole


def samples(model: Model, recipe: Recipe, setup: Setup) -> list[str]:
    """What the model says to the recipe's prompts, or to the first rows of the validation data."""
    if model.config.decoder is None:
        return ["an encoder alone does not generate"]
    prompts: list[str | list[int]] = [*recipe.train.samples]
    if not prompts:
        rows = np.arange(min(4, len(setup.validation)))
        batch = setup.validation.batch(rows, rows.astype(np.uint64))
        beginning = batch.tokens[:1, :16] if batch.source is None else batch.source
        prompts = [row.tolist() for row in beginning]
    said = []
    for prompt in prompts:
        ids = model.encode(prompt)
        room = min(SAMPLE_TOKENS, model.config.context - (0 if model.config.is_encoder_decoder else len(ids)))
        temperature = 0.0 if model.config.is_encoder_decoder else 0.8
        made = model.generate(ids, max_new_tokens=max(room, 1), temperature=temperature, seed=recipe.train.seed)
        text = setup.tokenizer.decode(ids)
        said.append(f"{text} => {made.text}" if model.config.is_encoder_decoder else text + made.text)
    return said
