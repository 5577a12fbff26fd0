"""The command line as a user meets it: data on stdout, one sentence on stderr, exit codes."""

import json
import resource
import subprocess
import sys

import pytest

from clearhead.checkpoint.huggingface import save_folder
from tests.checkpoint.tiny import tiny_network


def clearhead(*arguments, **options):
    command = [sys.executable, "-m", "clearhead", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


@pytest.fixture
def folder(tmp_path):
    save_folder(tiny_network(), tmp_path / "tiny")
    return tmp_path / "tiny"


def test_help_answers_at_once():
    """In processor time, which a busy machine does not stretch."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert clearhead("--help").returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


@pytest.mark.parametrize("command", ["show", "get", "convert", "generate", "presets", "verify"])
def test_every_command_has_help_with_an_example(command):
    done = clearhead(command, "--help")
    assert done.returncode == 0
    assert f"clearhead {command}" in done.stdout
    assert "--json" in done.stdout


def test_show_a_preset_and_a_folder(folder):
    assert "8,030,261,248 parameters" in clearhead("show", "llama-3.1-8b").stdout
    told = json.loads(clearhead("show", folder, "--json").stdout)
    assert told["config"]["width"] == 16
    assert told["parameters"] == sum(told["parts"].values())


def test_presets_as_json():
    told = json.loads(clearhead("presets", "--json").stdout)
    assert "gpt2-xl" in [name for names in told.values() for name in names]


def test_get_lists_what_there_is():
    names = [row["name"] for row in json.loads(clearhead("get", "--json").stdout)]
    assert "smollm2" in names


@pytest.mark.parametrize("kind", ["native", "huggingface"])
def test_convert(folder, tmp_path, kind):
    done = clearhead("convert", folder, tmp_path / "out", "--to", kind, "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["format"] == kind
    assert json.loads(clearhead("show", tmp_path / "out", "--json").stdout)["config"]["width"] == 16


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("show", "llama-3.1-8bb"), "unknown model 'llama-3.1-8bb'"),
        (("show", "no/such/folder"), "no/such/folder does not exist"),
        (("get", "smolm2"), "did you mean 'smollm2'"),
        (("generate", "gpt2", "hello"), "gpt2 is a preset, an architecture without weights"),
    ],
)
def test_a_wrong_input_is_one_sentence(arguments, sentence):
    done = clearhead(*arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1


def test_errors_of_use(folder, tmp_path):
    assert clearhead("convert", folder, tmp_path / "out", "--to", "pickle").returncode == 1
    assert clearhead("show").returncode == 2
    assert clearhead("shwo").returncode == 2
    no_text = clearhead("generate", folder, "hello")
    assert no_text.returncode == 1
    assert "this model has no tokenizer" in no_text.stderr


def test_debug_shows_the_traceback_wherever_it_stands():
    assert "Traceback" in clearhead("--debug", "show", "nothing").stderr
    assert "Traceback" in clearhead("show", "nothing", "--debug").stderr


def test_version():
    assert clearhead("--version").stdout.strip().count(".") == 2
