"""Messages of functions, which name Python parameters, are printed with the names of options and keys of a recipe."""

import pytest

from clearhead.cli.app import _describe_usage, _with_option_names


@pytest.mark.parametrize(
    ("command", "message", "printed"),
    [
        ("generate", "top_p is 2; it must be less", "--top-p is 2; it must be less"),
        (
            "generate",
            "temperature has no effect with beams; leave it out",
            "--temperature has no effect with --beams; ",
        ),
        ("generate", "stop contains ''; a stop string", "--stop contains ''; a stop string"),
        (
            "generate",
            "the model has weights; leave out weights='int8'",
            "the model has weights; leave out --weights int8",
        ),
        ("generate", "unsupported: leave out fast=True", "unsupported: leave out --fast"),
        ("generate", "to do without them, give fast=False", "to do without them, give --no-fast"),
        ("generate", "the seed of a plant is small", "the seed of a plant is small"),
        ("cost", "training_tokens applies only to phase 'train'", "--training-tokens applies only to phase 'train'"),
        ("cost", "source applies only to an encoder-decoder", "--source applies only to an encoder-decoder"),
        ("shards write", "choose another folder, or set overwrite=True", "choose another folder, or set --overwrite"),
        ("train --train.steps 0", "recipe.train.steps is 0; it must be", "--train.steps is 0; it must be"),
        ("train --train.steps=0", "recipe.train.steps is 0; it must be", "--train.steps is 0; it must be"),
        ("train mine.toml", "recipe.train.steps is 0; it must be", "recipe.train.steps is 0; it must be"),
        (
            "train --train.step 9",
            "unknown key in recipe.train: 'step'; did you mean 'steps'?",
            "unknown key --train.step; did you mean --train.steps?",
        ),
        (
            "train --train.zzz 9",
            "unknown key in recipe.train: 'zzz'; available: clip, keep",
            "unknown key --train.zzz; available: clip, keep",
        ),
        (
            "train mine.toml",
            "unknown key in recipe.train: 'step'; did you mean 'steps'?",
            "unknown key in recipe.train: 'step'; did you mean 'steps'?",
        ),
    ],
)
def test_names_of_options(command, message, printed):
    assert _with_option_names(message, command.split()).startswith(printed)


@pytest.mark.parametrize(
    ("message", "printed"),
    [
        ("No such option: --jsn (Possible options: --json)", "unknown option --jsn; did you mean --json?"),
        ("No such option: --xyz", "unknown option --xyz"),
        ("No such option: --jsn Did you mean --json?", "unknown option --jsn; did you mean --json?"),
        (
            "No such command 'ge'. Did you mean 'get', 'generate'?",
            "unknown command 'ge'; did you mean 'get' or 'generate'?",
        ),
        ("No such command 'xyz'.", "unknown command 'xyz'"),
        ("Invalid value for '--seed': Input should be greater than or equal to 0", "--seed must be 0 or more"),
        ("Missing argument 'MODEL'.", "missing argument 'MODEL'"),
    ],
)
def test_words_of_typer(message, printed):
    assert _describe_usage(message) == printed
