"""End a run: save the model, a loss curve and samples.

finished = finish_run(recipe, setup, learner, Path("runs/x"), reporter); finished.samples
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from clearhead.api import Model, RecurrentBaseline
from clearhead.checkpoint import Adapter, save_adapter
from clearhead.data import Batch
from clearhead.errors import ClearheadError
from clearhead.files import write_text
from clearhead.home import expand_user
from clearhead.model import RecurrentTranslator
from clearhead.training.checkpoints import restore_weights
from clearhead.training.curve import draw_loss_curve
from clearhead.training.learner import Learner
from clearhead.training.lora import add_lora, lora_matrices, merge_lora
from clearhead.training.models import LoadedModel
from clearhead.training.objective import Network
from clearhead.training.recipe import Recipe
from clearhead.training.reporter import Reporter
from clearhead.training.setup import Setup, network_kind

_MAX_SAMPLE_TOKENS, _PROMPT_TOKENS = 256, 16


@dataclass(frozen=True)
class Sample:
    """A text that the trained model generated, and the prompt that `clearhead generate` needs for another."""

    prompt: str
    text: str


@dataclass(frozen=True)
class FinishedRun:
    """The trained model and its samples."""

    model: Model
    samples: list[Sample]


def finish_run(recipe: Recipe, setup: Setup, learner: Learner, folder: Path, reporter: Reporter) -> FinishedRun | None:
    """Save the model, samples and the loss curve. All processes must call it; only the main one gets a result."""
    learner.load_final_weights()
    network = _gather_network(recipe, learner)
    if not learner.world.is_main:
        return None
    assert network is not None
    if recipe.lora is not None:
        save_adapter(folder / "adapter", _extract_adapter(network, recipe))
        merge_lora(network)
    details = (setup.tokenizer, setup.family, setup.special_ids)
    if isinstance(network, RecurrentTranslator):
        model: Model = RecurrentBaseline(network.eval(), *details)
    else:
        model = Model(network.eval(), *details)
    model.save(folder / "model")
    samples = _generate_samples(model, recipe, setup)
    write_text(folder / "sample.txt", "\n\n".join(sample.text for sample in samples) + "\n")
    try:
        draw_loss_curve(folder)
    except ClearheadError as error:
        reporter.print(f"loss.png was not written: {error}")
    return FinishedRun(model, samples)


def _gather_network(recipe: Recipe, learner: Learner) -> Network | None:
    """Return the trained network on the CPU with all shards gathered; None in other processes."""
    network = learner.network
    weights = learner.world.gather_weights(dict(network.named_parameters()) | dict(network.named_buffers()))
    if not learner.world.is_main:
        return None
    gathered: Network = type(network)(network.config)  # type: ignore[arg-type]  # each class with its own config
    if recipe.lora is not None:
        add_lora(gathered, replace(recipe.lora, dropout=None))
    restore_weights(dict(gathered.named_parameters()) | dict(gathered.named_buffers()), weights)
    return gathered


def _extract_adapter(network: Network, recipe: Recipe) -> Adapter:
    """Return the adapters of a network, with the model that they were trained for."""
    assert isinstance(recipe.model, LoadedModel)
    assert recipe.lora is not None
    path = expand_user(recipe.model.name)
    base = str(path.absolute()) if path.exists() else recipe.model.name
    return Adapter(base, recipe.lora.alpha / recipe.lora.rank, lora_matrices(network))


def sample_prompt(batch: Batch) -> list[int]:
    """Return the first row up to its first target, or its first tokens if all tokens have targets."""
    row = batch.tokens[0] if batch.mask is None else batch.tokens[0][batch.mask[0]]
    length = int((batch.targets[0] >= 0).int().argmax()) + 1
    return row[: length if length > 1 else _PROMPT_TOKENS].tolist()


def unpadded_sources(batch: Batch) -> list[list[int]]:
    """Return the encoder's input of each row without padding."""
    assert batch.source is not None
    mask = torch.ones_like(batch.source) if batch.source_mask is None else batch.source_mask
    return [row[row_mask.bool()].tolist() for row, row_mask in zip(batch.source, mask, strict=True)]


def _generate_samples(model: Model, recipe: Recipe, setup: Setup) -> list[Sample]:
    """Return the model's outputs for the recipe's prompts, or for the first rows of the validation data."""
    kind = network_kind(setup.network.config)
    if kind == "an encoder":
        return [Sample("", "an encoder-only model does not generate")]
    translates, context = kind == "an encoder-decoder", setup.network.config.context
    prompts: list[str | list[int]] = [*recipe.train.samples]
    if not prompts:
        rows = np.arange(min(4, len(setup.validation_data)))
        batch = setup.validation_data.batch(rows, rows.astype(np.uint64))
        prompts = [*unpadded_sources(batch)] if translates else [sample_prompt(batch)]
    samples = []
    for prompt in prompts:
        # Encoded here, because the model would reject a prompt with characters that its vocabulary lacks.
        ids = setup.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        if not 1 <= len(ids) <= context:
            reason = (
                f"it exceeds the model's context of {context} tokens" if ids else "it has no token of the vocabulary"
            )
            samples.append(Sample("", f"{prompt!r} was skipped: {reason}"))
            continue
        max_new_tokens = max(min(_MAX_SAMPLE_TOKENS, context - (0 if translates else len(ids))), 1)
        text = setup.tokenizer.decode(ids)
        # Pairs in one row need the token that separates source and target, which is a special one.
        in_one_row = getattr(recipe.data, "form", None) == "continuation"
        typed = setup.tokenizer.decode(ids, skip_special_tokens=not in_one_row)
        if translates:
            generation = model.generate(ids, max_new_tokens=max_new_tokens, temperature=0.0)
            samples.append(Sample(typed, f"{text} => {generation.text}"))
        else:
            generation = model.generate(ids, max_new_tokens=max_new_tokens, temperature=0.8, seed=recipe.train.seed)
            samples.append(Sample(typed, text + generation.text))
    return samples
