"""Test the training loop: learning, resuming, stopping, rejected recipes, and the files of a run."""

import json
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import clearhead
from clearhead.config import to_dict
from clearhead.data.batch import Batch
from clearhead.errors import ClearheadError
from clearhead.families.gpt import gpt_config
from clearhead.families.gpt_style import multi_head_attention
from clearhead.training import loop
from clearhead.training.finish import sample_prompt, unpadded_sources
from clearhead.training.loop import split_batch
from clearhead.training.metrics import read_metrics
from clearhead.training.objective import Objective
from tests.training.recipes import LANGUAGE_MODEL, quiet_console, recipe, run

TEXT = "to be or not to be, that is the question: " * 20


def weights_in(folder):
    return load_file(folder / "model" / "weights.safetensors")


def losses_in(folder):
    return [(row["step"], row.get("loss"), row.get("validation_loss")) for row in read_metrics(folder)]


def test_training_lowers_the_loss_and_writes_all_files(tmp_path):
    settings = {"steps": 100, "optimizer": {"kind": "muon", "learning_rate": 0.02, "rest": {"learning_rate": 0.02}}}
    trained = run(
        tmp_path, {"model": {"dropout": 0.0}, "train": settings, "data": {"max_length": 2, "num_examples": 2000}}
    )
    rows = losses_in(tmp_path)
    assert rows[0][1] > 3.0 > 2.0 > trained.validation_loss
    assert trained.loss == rows[-2][1]
    model = clearhead.load(tmp_path / "model")
    assert model.generate("ab", max_new_tokens=4).tokens
    assert {path.name for path in tmp_path.iterdir()} >= {"loss.png", "sample.txt", "recipe.toml", "metrics.jsonl"}
    assert " => " in (tmp_path / "sample.txt").read_text()
    assert clearhead.from_toml(type(recipe()), (tmp_path / "recipe.toml").read_text()).train.steps == 100


def test_a_language_model_trains_in_bfloat16_with_chunks_and_accumulation(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    where = {"data": {"path": str(tmp_path / "text.txt")}}
    changes = {"train": {"steps": 30, "precision": "bfloat16", "chunk_tokens": 20, "accumulation": 2}}
    trained = run(tmp_path / "run", LANGUAGE_MODEL, where, changes)
    assert trained.validation_loss < 2.9  # 17 characters: ln 17 = 2.8 at the start
    model = clearhead.load(tmp_path / "run" / "model")
    assert model.score("to be or not").perplexity > 1
    assert set(read_metrics(tmp_path / "run")[0]) >= {"step", "loss", "learning_rate", "gradient_norm", "seconds_left"}


class KilledError(Exception):
    pass


@pytest.mark.parametrize("changes", [{}, {"average": 0.9, "keep": "best"}, {"optimizer": {"kind": "muon"}}], ids=str)
def test_an_interrupted_and_resumed_run_is_bit_equal_to_an_uninterrupted_one(tmp_path, monkeypatch, changes):
    run(tmp_path / "uninterrupted", {"train": changes})
    validate = loop.validate

    def validate_and_die(*arguments):
        validate(*arguments)
        raise KilledError

    monkeypatch.setattr(loop, "validate", validate_and_die)  # at step 6; the last checkpoint is of step 3
    with pytest.raises(KilledError):
        run(tmp_path / "interrupted", {"train": changes})
    monkeypatch.setattr(loop, "validate", validate)
    run(tmp_path / "interrupted", {"train": changes})
    assert losses_in(tmp_path / "interrupted") == losses_in(tmp_path / "uninterrupted")
    expected = weights_in(tmp_path / "uninterrupted")
    assert all(torch.equal(weight, expected[name]) for name, weight in weights_in(tmp_path / "interrupted").items())


def test_sigterm_saves_and_exits_with_143(tmp_path, monkeypatch):
    validate = loop.validate

    def signal_and_validate(*arguments):
        signal.raise_signal(signal.SIGTERM)
        return validate(*arguments)

    monkeypatch.setattr(loop, "validate", signal_and_validate)
    with pytest.raises(SystemExit) as exit_info:
        run(tmp_path, {"train": {"save_every": 100}})
    assert exit_info.value.code == 143
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000006"]


def test_a_finished_run_does_not_train_again(tmp_path):
    run(tmp_path)
    before = weights_in(tmp_path)
    assert run(tmp_path).loss is None
    assert all(torch.equal(weight, before[name]) for name, weight in weights_in(tmp_path).items())


def test_fewer_steps_than_completed_are_rejected(tmp_path):
    run(tmp_path)
    with pytest.raises(
        ClearheadError, match=r"has completed 12 steps, more than train\.steps 5; raise train\.steps or"
    ):
        run(tmp_path, {"train": {"steps": 5}})


def test_a_run_in_another_thread(tmp_path):
    """Python allows signal handlers in the main thread only; the run works without them."""
    with ThreadPoolExecutor() as pool:
        assert pool.submit(run, tmp_path, {"train": {"steps": 2}}).result().num_steps == 2


def test_another_recipe_in_the_same_folder_is_rejected(tmp_path):
    run(tmp_path)
    with pytest.raises(
        ClearheadError, match=r"started with model\.width 16, but the recipe now has 8; choose another folder"
    ):
        run(tmp_path, {"model": {"width": 8}})
    run(tmp_path, {"train": {"log_every": 2}})


def test_accumulation_does_not_change_the_losses(tmp_path):
    """Train on pairs of unequal lengths, without dropout, whose random numbers depend on the input shape."""
    plain = {"model": {"dropout": 0.0}}
    run(tmp_path / "one", plain)
    run(tmp_path / "four", plain, {"train": {"accumulation": 4}})
    for one, four in zip(read_metrics(tmp_path / "one"), read_metrics(tmp_path / "four"), strict=True):
        name = "loss" if "loss" in one else "validation_loss"
        assert four[name] == pytest.approx(one[name], rel=1e-6)


def test_training_and_validation_compute_only_one_part_at_a_time(tmp_path, monkeypatch):
    """The logits of a validation batch take as much memory as those of a training batch."""
    sizes, forward = [], Objective.forward
    monkeypatch.setattr(
        Objective, "forward", lambda self, batch: sizes.append(len(batch.tokens)) or forward(self, batch)
    )
    run(tmp_path, {"train": {"accumulation": 4}})
    assert max(sizes) == 8 // 4


def test_a_loss_that_is_not_finite_aborts_before_the_update(tmp_path):
    settings = {"clip": 0, "save_every": 1, "optimizer": {"kind": "adam_w", "learning_rate": 1e30}}
    with pytest.raises(ClearheadError, match=r"the weights were not updated.*begins with '[a-z]"):
        run(tmp_path, {"train": settings})
    (path,) = tmp_path.glob("bad-batch-*.txt")
    step = int(path.stem.rpartition("-")[2])
    assert len(path.read_text().splitlines()) == 8 * 3 - 1
    assert [row["step"] for row in read_metrics(tmp_path)] == list(range(1, step + 1))
    assert max(path.name for path in (tmp_path / "checkpoints").iterdir()) == f"step-{step:08d}"


def test_keep_best_returns_the_lowest_validation_loss(tmp_path):
    settings = {"steps": 40, "keep": "best", "validate_every": 5, "average": 0.5}
    trained = run(tmp_path, {"train": settings | {"optimizer": {"kind": "adam_w", "learning_rate": 0.3}}})
    losses = [row["validation_loss"] for row in read_metrics(tmp_path) if "validation_loss" in row]
    assert trained.validation_loss == min(losses) < losses[-1]


def test_lora_changes_only_the_target_weights(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    where = {"data": {"path": str(tmp_path / "text.txt")}}
    run(tmp_path / "first", LANGUAGE_MODEL, where)
    loaded = {
        "model": {"kind": "loaded_model", "name": str(tmp_path / "first" / "model")},
        "tokenizer": None,
        "lora": {"rank": 2, "targets": ["query", "up"], "dropout": 0.1},
    }
    run(tmp_path / "second", LANGUAGE_MODEL, where, loaded)
    first, second = weights_in(tmp_path / "first"), weights_in(tmp_path / "second")
    changed = {name for name in first if not torch.equal(first[name], second[name])}
    assert changed == {"decoder.layers.0.attention.query.weight", "decoder.layers.0.feed_forward.up.weight"}
    saved = load_file(tmp_path / "second" / "checkpoints" / "step-00000012" / "weights.safetensors")
    assert all(name.endswith(("reduce", "expand")) for name in saved)


def test_a_loaded_model_uses_dropout_from_the_first_step(tmp_path):
    """A loaded model is in evaluation mode; training mode must not depend on the first validation."""
    run(tmp_path / "first", {"train": {"steps": 1}})
    again = {"model": {"kind": "loaded_model", "name": str(tmp_path / "first" / "model")}, "tokenizer": None}
    run(tmp_path / "early", again, {"train": {"validate_every": 1}})
    run(tmp_path / "late", again, {"train": {"validate_every": 12}})
    early, late = ([loss for _, loss, _ in losses_in(tmp_path / name) if loss] for name in ("early", "late"))
    assert early == late


def test_recurrent_networks_train_in_the_same_loop(tmp_path):
    model = {"kind": "recurrent_model", "width": 16, "context": 32}
    result = run(tmp_path, {"model": model, "train": {"steps": 40}})
    assert result.loss < losses_in(tmp_path)[0][1]
    assert (tmp_path / "loss.png").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": {"context": 64}}, r"data\.context is 64, but the model's context is 32"),
        ({"model": {"kind": "preset_model", "name": "gpt2", "vocab_size": 5}}, "the model only 5; set vocab_size to"),
        ({"tokenizer": {"kind": "tokenizer_file", "path": "nowhere"}}, "nowhere does not exist"),
        ({"model": {"kind": "loaded_model", "name": "x"}}, r"remove \[tokenizer\]"),
        ({"lora": {"rank": 2}}, "needs a model of kind loaded_model"),
        ({"train": {"balance": {"kind": "balance_loss"}}}, "no experts to balance"),
        ({"train": {"accumulation": 3}}, r"train\.batch_size is 8; it must be a multiple of train\.accumulation, 3"),
        ({"train": {"stesp": 3}}, "did you mean 'steps'"),
        ({"train": {"num_workers": 10**6}}, r"train\.num_workers is 1000000; it must be at most 256"),
        ({"train": {"optimizer": {"kind": "adam"}}}, "adam_w"),
        ({"data": {"kind": "text_data", "path": "nothing.txt", "context": 8}}, r"nothing\.txt does not exist"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_invalid_recipes_are_rejected_and_leave_no_folder(tmp_path, change, message):
    with pytest.raises(ClearheadError, match=message):
        run(tmp_path / "run", change)
    assert not (tmp_path / "run").exists()


def test_an_empty_corpus_is_rejected(tmp_path):
    (tmp_path / "text.txt").write_text("")
    with pytest.raises(ClearheadError, match="empty"):
        run(tmp_path / "run", LANGUAGE_MODEL, {"data": {"path": str(tmp_path / "text.txt")}})


def test_sample_prompt_ends_before_the_first_target():
    """A chat's prompt ends before its first target. A text, whose tokens all have targets, gives its first tokens."""
    tokens = torch.arange(40).view(1, 40)
    next_tokens = tokens + 1
    assert sample_prompt(Batch(tokens=tokens, targets=next_tokens)) == list(range(16))
    chat = torch.where(tokens < 21, -100, next_tokens)
    assert sample_prompt(Batch(tokens=tokens, targets=chat)) == list(range(22))
    short = tokens < 5  # a padded row whose first token has a target
    assert sample_prompt(Batch(tokens=tokens, targets=torch.where(short, next_tokens, -100), mask=short)) == list(
        range(5)
    )


def test_unpadded_sources_removes_padding():
    source = torch.tensor([[5, 6, 7], [8, 0, 0]])
    batch = Batch(tokens=source, targets=source, source=source, source_mask=source > 0)
    assert unpadded_sources(batch) == [[5, 6, 7], [8]]
    assert unpadded_sources(replace(batch, source_mask=None)) == [[5, 6, 7], [8, 0, 0]]


def test_samples_equal_what_the_model_generates_for_each_prompt(tmp_path):
    """The first validation sources have unequal lengths and come from one padded batch."""
    result = run(tmp_path)
    model = clearhead.load(result.folder / "model")
    texts = [line.partition(" => ") for line in (tmp_path / "sample.txt").read_text().split("\n\n")]
    assert len({len(source) for source, _, _ in texts}) > 1
    for source, _, answer in texts:
        assert model.generate(source, max_new_tokens=32).text == answer.removesuffix("\n")


@pytest.mark.parametrize("prompt", ["", "to be " * 30])
def test_a_sample_prompt_that_is_empty_or_too_long_is_skipped(tmp_path, prompt):
    attentions = [multi_head_attention(16, 2)]
    config = to_dict(gpt_config(width=16, attentions=attentions, vocab_size=40, context=32))  # learned positions
    (tmp_path / "text.txt").write_text(TEXT)
    model = {"model": {"kind": "whole_model", "config": config}, "train": {"steps": 1, "samples": [prompt, "to be"]}}
    run(tmp_path / "run", LANGUAGE_MODEL | model, {"data": {"path": str(tmp_path / "text.txt")}})
    skipped, sample = (tmp_path / "run" / "sample.txt").read_text().split("\n\n")
    assert skipped.startswith(f"{prompt!r} was skipped: ")
    assert sample.startswith("to be")


def test_split_batch_contains_all_rows_once():
    tokens = torch.arange(14).view(7, 2)
    parts = split_batch(Batch(tokens=tokens, targets=tokens + 1, mask=tokens > 3), 3)
    assert torch.equal(torch.cat([part.tokens for part in parts]), tokens)
    assert torch.equal(torch.cat([part.targets for part in parts]), tokens + 1)
    assert all(part.source is None for part in parts)


def test_plain_lines_are_printed_without_a_terminal(tmp_path):
    console = quiet_console()
    loop.train(recipe({"train": {"log_every": 4}}), tmp_path, console)
    lines = console.file.getvalue().splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["model", "data", "train", "step"]
    assert lines[3].startswith("step 4/12  loss ")
    assert sum(line.startswith("step") and "validation" in line for line in lines) == 2
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["step"] == 4


def test_a_resumed_run_deletes_the_checkpoints_that_a_killed_one_left(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:  # as if the process was killed after each save, before it deleted old ones
        patch.setattr("clearhead.training.checkpoints.RunFolder._delete_old_checkpoints", lambda *_: None)
        run(tmp_path)
    checkpoints = tmp_path / "checkpoints"
    assert len(list(checkpoints.iterdir())) == 4
    run(tmp_path)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-00000009", "step-00000012"]


def test_damaged_checkpoints_stay_until_the_next_save(tmp_path):
    run(tmp_path)
    newest = tmp_path / "checkpoints" / "step-00000012"
    (newest / "state.json").write_text("{}")
    with pytest.raises(ClearheadError, match="started with"):
        run(tmp_path, {"train": {"seed": 7}})
    assert newest.exists()


def test_two_runs_of_one_recipe_write_equal_checkpoints(tmp_path):
    random.seed(1)
    run(tmp_path / "first")
    random.seed(2)
    np.random.seed(2)
    run(tmp_path / "second")
    files = [sorted((tmp_path / name / "checkpoints").rglob("*.*")) for name in ("first", "second")]
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]
