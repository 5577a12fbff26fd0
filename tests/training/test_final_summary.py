"""Test what a run prints at its end, and the public function `clearhead.train`."""

import shlex

import pytest

import clearhead
from clearhead.errors import ClearheadError
from clearhead.training.final_summary import next_commands, summarize_result
from clearhead.training.finish import Sample
from clearhead.training.recipe import read_recipe
from clearhead.training.result import TrainingResult
from tests.training.recipes import LANGUAGE_MODEL, quiet_console, run

TEXT = "to be or not to be, that is the question: " * 20


def test_the_end_shows_losses_a_sample_and_commands_for_a_translator(tmp_path):
    console = quiet_console()
    result = clearhead.train(
        "capitals", tmp_path / "run", console, smoke=True, train={"steps": 2, "device": "cpu"}, **{"train.seed": 3}
    )
    shown = console.file.getvalue()
    assert "finished 2 steps: loss " in shown
    assert "changed  " in shown
    assert "train.seed 3" in shown
    assert result.sample.splitlines()[0].strip() in shown
    folder = tmp_path / "run" / "model"
    assert f"  clearhead generate {folder} " in shown
    assert " --source " in next(line for line in shown.splitlines() if f"clearhead trace {folder}" in line)
    assert "clearhead chat" not in shown
    assert result.load().generate("<U> a", max_new_tokens=2).tokens


def test_a_recurrent_network_gets_no_trace_command(tmp_path):
    model = run(
        tmp_path, {"model": {"kind": "recurrent_model", "width": 8, "context": 32}, "train": {"steps": 1}}
    ).load()
    commands = list(next_commands(model, [Sample("abc", "abc => abc")], tmp_path / "model"))
    assert [command.split()[1] for command in commands] == ["generate"]


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("to be", "to be or", "to be"),
        ("\n", "\n\nROMEO: I am here\nto stay", "ROMEO: I am here"),
        ("it's", "it's", "it's"),
        ("-x", "-x is\nwell", None),
        ("\n", "\n", None),
        ("", "word " * 30, "word word word word word word word word"),
    ],
)
def test_the_prompt_of_the_commands_can_be_typed(tmp_path, prompt, text, expected):
    (tmp_path / "text.txt").write_text(TEXT)
    config = clearhead.from_toml(clearhead.ModelConfig, clearhead.to_toml(small_decoder()))
    commands = list(next_commands(clearhead.create(config), [Sample(prompt, text)], tmp_path / "a b"))
    prompts = [shlex.split(command)[2:] for command in commands]
    assert prompts == ([] if expected is None else [[str(tmp_path / "a b"), expected]] * 2)


def small_decoder():
    from clearhead.training.models import DecoderModel, build_model_config

    sizes = {name: value for name, value in LANGUAGE_MODEL["model"].items() if name != "kind"}
    return build_model_config(DecoderModel(**sizes), vocab_size=10)


def test_a_finished_run_that_is_started_again_has_no_losses_to_show(tmp_path):
    model = clearhead.create(small_decoder())
    lines = summarize_result(TrainingResult(tmp_path, 5, None, None), model, [Sample("a", "a b")])
    assert lines[0] == "finished 5 steps"


def test_train_takes_a_recipe_that_was_read_and_changes_it(tmp_path):
    resolved = read_recipe("capitals", smoke=True)
    assert clearhead.train(resolved.recipe, tmp_path, quiet_console(), train={"steps": 1}).num_steps == 1
    with pytest.raises(ClearheadError, match=r"unknown key in recipe\.train: 'stpes'; did you mean 'steps'"):
        clearhead.train(resolved, tmp_path, quiet_console(), train={"stpes": 1})
    with pytest.raises(ClearheadError, match="smoke applies the"):
        clearhead.train(resolved, tmp_path, quiet_console(), smoke=True)
    with pytest.raises(ClearheadError, match="unknown key in recipe: 'steps'"):
        clearhead.train("capitals", tmp_path, quiet_console(), steps=1)
