"""How a run ends: well, with a model, a picture and a sample; or at numbers that are no numbers, with the batch shown.

finish(recipe, setup, learner, Path("runs/x"), display)
"""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from clearhead.api import Model, RecurrentBaseline
from clearhead.data import Batch
from clearhead.errors import ClearheadError
from clearhead.files import write_text
from clearhead.model import RecurrentTranslator
from clearhead.tokenization import Tokenizer
from clearhead.training.checkpoints.state import restore_weights
from clearhead.training.curve import draw_curve
from clearhead.training.display import Display
from clearhead.training.learner import Learner
from clearhead.training.lora import add_lora, merge_lora
from clearhead.training.objective import Network
from clearhead.training.recipe import Recipe
from clearhead.training.setup import Setup, form_of

SAMPLE_TOKENS, OPENING_TOKENS, SHOWN_CHARACTERS = 256, 16, 200


def refuse(
    step: int, loss: float, norm: float, batch: Batch, tokenizer: Tokenizer, folder: Path, rank: int = 0
) -> None:
    """Stop before the update where loss or gradient is not finite; each process writes its part of the batch down."""
    if math.isfinite(loss) and math.isfinite(norm):
        return
    path = folder / (f"bad-batch-{step}-{rank}.txt" if rank else f"bad-batch-{step}.txt")
    read = batch.tokens if batch.source is None else batch.source
    rows = [tokenizer.decode(row, skip_special_tokens=False) for row in read.tolist()]
    answers = [[token for token in row if token >= 0] for row in batch.targets.tolist()]
    asked = [tokenizer.decode(row, skip_special_tokens=False) for row in answers]
    pairs = zip(rows, asked, strict=True)
    write_text(path, "\n".join(f"reads: {row!r}\nasked: {answer!r}\n" for row, answer in pairs))
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
    assert network is not None
    kept = (setup.tokenizer, setup.family, setup.special_ids)
    if isinstance(network, RecurrentTranslator):
        model: Model = RecurrentBaseline(network.eval(), *kept)
    else:
        model = Model(network.eval(), *kept)
    model.save(folder / "model")
    write_text(folder / "sample.txt", "\n\n".join(samples(model, recipe, setup)) + "\n")
    try:
        draw_curve(folder)
    except ClearheadError as error:
        display.say(f"no picture of the loss: {error}")


def whole_network(recipe: Recipe, learner: Learner) -> Network | None:
    """The trained network on the CPU, put together from its slices, additions merged; None but in the main process."""
    network = learner.network
    weights = learner.world.gather_weights(dict(network.named_parameters()) | dict(network.named_buffers()))
    if not learner.world.is_main:
        return None
    whole: Network = type(network)(network.config)  # type: ignore[arg-type]  # each class with its own config
    if recipe.lora is not None:
        add_lora(whole, replace(recipe.lora, dropout=None))
    restore_weights(dict(whole.named_parameters()) | dict(whole.named_buffers()), weights)
    merge_lora(whole)
    return whole


def opening_of(batch: Batch) -> list[int]:
    """Of the first row: what comes before the first token that is asked for, or some tokens where all are."""
    row = batch.tokens[0] if batch.mask is None else batch.tokens[0][batch.mask[0]]
    num_read = int((batch.targets[0] >= 0).int().argmax()) + 1
    return row[: num_read if num_read > 1 else OPENING_TOKENS].tolist()


def sources_of(batch: Batch) -> list[list[int]]:
    """What the encoder reads in each row, without padding."""
    assert batch.source is not None
    real = torch.ones_like(batch.source) if batch.source_mask is None else batch.source_mask
    return [row[kept.bool()].tolist() for row, kept in zip(batch.source, real, strict=True)]


def samples(model: Model, recipe: Recipe, setup: Setup) -> list[str]:
    """What the model says to the recipe's prompts, or to the first rows of the validation data."""
    form = form_of(setup.network.config)
    if form == "an encoder":
        return ["an encoder alone does not generate"]
    answers, context = form == "an encoder-decoder", setup.network.config.context
    prompts: list[str | list[int]] = [*recipe.train.samples]
    if not prompts:
        rows = np.arange(min(4, len(setup.validation)))
        batch = setup.validation.batch(rows, rows.astype(np.uint64))
        prompts = [*sources_of(batch)] if answers else [opening_of(batch)]
    said = []
    for prompt in prompts:
        # Not by the model, which would refuse what the vocabulary of other data has no token for.
        ids = setup.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        if not 1 <= len(ids) <= context:
            why = f"it has more than the model's {context} tokens" if ids else "no token of this vocabulary is in it"
            said.append(f"{prompt!r} was not asked: {why}")
            continue
        room = max(min(SAMPLE_TOKENS, context - (0 if answers else len(ids))), 1)
        chance: dict[str, float] = {"temperature": 0.0} if answers else {"temperature": 0.8, "seed": recipe.train.seed}
        made = model.generate(ids, max_new_tokens=room, **chance)
        text = setup.tokenizer.decode(ids)
        said.append(f"{text} => {made.text}" if answers else text + made.text)
    return said
