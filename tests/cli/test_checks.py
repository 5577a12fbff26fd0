"""A wrong name, file or option is answered before torch is imported, by every command that takes one."""

import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from clearhead.cli.checks import (
    COST_OPTIONS,
    MEASURABLE_DEVICES,
    check_installed,
    check_layer,
    check_model,
    find_texts,
)
from clearhead.costs.calibration.devices import DEVICES
from clearhead.costs.formulas import Phase, workload
from clearhead.errors import ClearheadError

# Runs commands in forks of a process without torch, in which importing torch ends the command with code 3.
PROGRAM = """
import json, os, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            print("torch was imported", file=sys.stderr)
            raise SystemExit(3)
sys.meta_path.insert(0, Refuse())
from tests.forked_command import run_forked
for line in sys.stdin:
    folder, *command = json.loads(line)
    os.chdir(folder)
    print(json.dumps(vars(run_forked(*command))), flush=True)
"""
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run_without_torch():
    """Return a function that runs a command in a folder and returns its exit code and what it prints."""
    command, pipes = [sys.executable, "-c", PROGRAM], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:

        def run(folder, command):
            process.stdin.write(json.dumps([str(folder), *command.split()]) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield run
        process.stdin.close()


def test_importing_torch_is_noticed(run_without_torch, tmp_path):
    done = run_without_torch(tmp_path, "generate capitals hello")
    assert done == {"returncode": 3, "stdout": "", "stderr": "torch was imported\n"}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("generate smolm2 hello", "did you mean 'smollm2'"),
        ("generate no/such/folder hello", "does not exist"),
        ("generate gpt2 hello", "gpt2 is a preset"),
        ("generate capitals hello --dtype float23", "unknown dtype 'float23'"),
        ("generate ./hello hello", "./hello does not exist; check the path"),
        ("generate broken.gguf hello", "broken.gguf is not a GGUF file: it begins with b'GGML' instead of b'GGUF'"),
        ("generate capitals hello --dtype fp16", "unknown dtype 'fp16'; did you mean 'float16'?"),
        ("generate capitals hello --device gpu", "unknown device 'gpu'; use cuda for an NVIDIA"),
        ("generate capitals hello --beams 0", "--beams is 0; it must be a whole number, 1 or more"),
        ("generate capitals hello --beams 2 --temperature 1", "--temperature has no effect with --beams; leave it out"),
        ("generate capitals hello --seed 1", "--seed has no effect at --temperature 0"),
        ("generate capitals hello --weights int5", "unknown weights 'int5'"),
        ("generate capitals hello --weights stored", "which only .gguf files and quantized folders have"),
        ("generate capitals hello --speculate lokup", "did you mean 'lookup'"),
        ("generate capitals hello --temperature -1", "--temperature is -1"),
        ("generate capitals hello --raw --system x", "give only one of them"),
        ("chat smolm2", "did you mean 'smollm2'"),
        ("chat capitals --load missing.json", "missing.json does not exist; check the path"),
        ("verify smolm2", "did you mean 'smollm2'"),
        ("verify capitals --new-tokens 0", "--new-tokens is 0"),
        ("trace smolm2 hello", "did you mean 'smollm2'"),
        ("trace capitals hello --out page.pdf", "unsupported extension"),
        ("score smolm2 hello", "did you mean 'smollm2'"),
        ("score capitals --file missing.txt", "missing.txt"),
        ("embed smolm2 hello", "did you mean 'smollm2'"),
        ("eval smolm2 --task arc-easy", "did you mean 'smollm2'"),
        ("eval capitals --task arc-eazy", "did you mean 'arc-easy'"),
        ("eval capitals --task perplexity --text missing.txt", "missing.txt does not exist; check the path"),
        ("bench decode smolm2", "did you mean"),
        ("bench decod smollm2", "did you mean 'decode'"),
        ("cost gpt2x", "did you mean"),
        ("cost gpt2 --dtype float23", "unknown dtype 'float23'"),
        ("cost gpt2 --phase decoding", "did you mean 'decode'"),
        ("cost gpt2 --weights q4_2", "unknown weights 'q4_2'; did you mean 'q4_"),
        ("cost gpt2 --device h20", "did you mean 'h200'"),
        ("cost gpt2 --optimizer adam", "did you mean 'adamw'"),
        ("cost gpt2 --parallel ddd", "did you mean 'ddp'"),
        ("cost gpt2 --batch 0", "--batch is 0; it must be 1 or more"),
        ("calibrate --device gpu", "unknown device to measure 'gpu'; use cpu, or cuda"),
        ("curves curves.png --device gpu", "unknown device to measure 'gpu'"),
        ("curves curves.pdf", "unsupported extension"),
        ("tokenizer train missing.txt --vocab-size 300 --out folder", "missing.txt does not exist"),
        ("tokenizer train . --out folder", "a bpe tokenizer needs a --vocab-size, such as 8000"),
        ("shards write missing.txt --tokenizer missing --out folder", "missing.txt does not exist"),
        ("shards write . --tokenizer missing --out folder", "give a folder with a tokenizer"),
        ("shards verify missing", "missing does not exist"),
        ("show gtp2", "did you mean"),
        ("convert smolm2 folder", "did you mean 'smollm2'"),
        ("convert capitals folder --to pickle", "unknown format 'pickle'"),
        ("get dolma", "unknown model or data set 'dolma'; `clearhead list` shows all names"),
        ("get smolm2", "did you mean 'smollm2'"),
        ("info gpt2", "gpt2 is a preset"),
        ("info smolm2", "did you mean 'smollm2'"),
        ("remove smolm2", "did you mean 'smollm2'"),
        ("remove capitals", "capitals is part of Clearhead itself"),
        ("train capitls --out run", "capitals"),
        ("train capitls", "did you mean 'capitals'"),
        (
            "train capitals --out run --steps 5",
            "unknown option '--steps'; to change a value of the recipe, give its whole",
        ),
        ("serve capitals --port 99999", "--port is 99999; it must be from 1 to 65535"),
        ("serve capitals --max-queued -1", "--max-queued is -1; it must be 0 or more"),
        ("serve capitals --max-new-tokens 0", "--max-new-tokens is 0"),
    ],
)
def test_a_mistake_is_answered_before_torch_is_imported(command, words, tmp_path, run_without_torch):
    (tmp_path / "broken.gguf").write_bytes(b"GGML")
    done = run_without_torch(tmp_path, command)
    assert (done["returncode"], done["stdout"]) == (1, ""), done["stderr"]
    assert words in done["stderr"]
    assert done["stderr"].count("\n") == 1


def test_the_names_known_without_torch_are_those_of_costs():
    choices = {
        "phase": get_args(Phase),
        "dtype": workload._DTYPE_BYTES,
        "weights": ["full", *workload.PACKED_BITS],
        "optimizer": workload.OPTIMIZER_STATES,
        "parallel": get_args(workload.Parallel),
        "device": [*(device.name for device in DEVICES), *MEASURABLE_DEVICES],
    }
    assert {option: set(names) for option, names in COST_OPTIONS.items()} == {
        option: set(names) for option, names in choices.items()
    }


def test_a_folder_that_is_no_model_is_rejected(tmp_path):
    with pytest.raises(
        ClearheadError,
        match=r"must contain config\.json, clearhead\.json, model\.bin, adapter\.json or adapter_config\.json",
    ):
        check_model(str(tmp_path))
    (tmp_path / "notes.txt").write_text("no model")
    with pytest.raises(ClearheadError, match="not a model file"):
        check_model(str(tmp_path / "notes.txt"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "clearhead.json").write_text("{}")
    with pytest.raises(ClearheadError, match="the folder of a training run"):
        check_model(str(tmp_path))


def test_texts_are_files_folders_or_installed_data_sets(tmp_path, monkeypatch):
    monkeypatch.setenv("CLEARHEAD_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("text")
    assert find_texts([Path("mine.txt"), tmp_path]) == [Path("mine.txt"), tmp_path]
    with pytest.raises(ClearheadError, match="run `clearhead get books` first"):
        find_texts([Path("books")])
    (tmp_path / "books").mkdir()
    assert find_texts([Path("books")]) == [Path("books")]  # what exists here comes before the data set
    with pytest.raises(ClearheadError, match="bookz does not exist"):
        find_texts([Path("bookz")])


def test_a_missing_extra_is_named_with_the_command_that_installs_it(monkeypatch):
    check_installed(["json"], "a plot", "plot")
    monkeypatch.setitem(sys.modules, "blocked", None)
    with pytest.raises(ClearheadError) as raised:
        check_installed(["json", "no_such_package", "blocked"], "a plot", "plot")
    assert str(raised.value) == 'a plot needs no_such_package, blocked; run: pip install "clearhead[plot]"'


def test_a_name_too_long_for_a_file_is_an_unknown_model():
    with pytest.raises(ClearheadError, match="unknown model"):
        check_model("x" * 5000)


def test_an_interrupted_save_is_left_to_loading(tmp_path):
    (tmp_path / ".mine.12345678.previous").mkdir()
    assert check_model(str(tmp_path / "mine")) is None


def test_hub_ids_and_presets():
    assert check_model("someone/some-model") is None
    assert check_model("gpt2", presets_allowed=True) is None
    with pytest.raises(ClearheadError, match="preset"):
        check_model("gpt2")


@pytest.mark.parametrize(("layer", "head", "words"), [(30, None, "layer 30"), (0, 9, "head 9"), (-31, 0, "layer -31")])
def test_a_layer_or_head_that_a_file_lacks(smollm2_gguf, layer, head, words):
    check_layer(smollm2_gguf, 29, -9)
    check_layer(None, layer, head)
    with pytest.raises(ClearheadError, match=f"{words} is out of range: there are"):
        check_layer(smollm2_gguf, layer, head)
