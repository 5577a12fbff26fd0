"""The commands create and study."""

import io
import json
import re
import sys
from types import SimpleNamespace

import pytest

from clearhead.api import load
from clearhead.cli import main
from clearhead.families import preset, shrink
from tests.audio.files import write_wav
from tests.transcription.toys import warble


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs one command."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["clearhead", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(""))
        with pytest.raises(SystemExit) as exit_info:
            main()
        out, err = capsys.readouterr()
        return SimpleNamespace(returncode=exit_info.value.code or 0, stdout=out, stderr=err)

    return call


@pytest.mark.parametrize("name", ["llama-4-scout", "transformer-base", "bert-base"])
def test_create_writes_a_tiny_model_that_works(run, tmp_path, name):
    folder = tmp_path / "model"
    data = json.loads(run("create", name, "--tiny", "--out", folder, "--json").stdout)
    assert data["parameters"] < 2_000_000
    model = load(folder)
    assert model.config == shrink(preset(name))
    if model.config.decoder is not None:
        assert len(model.generate("Hello", max_new_tokens=3).tokens) <= 3
    assert "already exists" in run("create", name, "--tiny", "--out", folder).stderr
    assert "did you mean 'gpt2'" in run("create", "gtp2", "--tiny").stderr


def test_a_tiny_speech_model_transcribes(run, tmp_path):
    folder, file = tmp_path / "model", tmp_path / "tone.wav"
    run("create", "whisper-tiny", "--tiny", "--out", folder)
    write_wav(file, warble(seconds=1.5))
    data = json.loads(run("transcribe", folder, file, "--max-new-tokens", 9, "--timestamps", "--json").stdout)
    assert data["language"] in ("en", "de", "fr")
    assert data["duration"] == 1.5
    assert all(0 <= part["start"] <= part["end"] <= 1.5 for part in data["segments"])
    options = ("--language", "de", "--task", "translate", "--beams", 2, "--max-new-tokens", 5)
    assert run("transcribe", folder, file, *options).returncode == 0
    lines = run("transcribe", folder, file, "--max-new-tokens", 9, "--timestamps").stdout
    assert lines.count("[") == len(data["segments"])
    assert "did you mean 'translate'" in run("transcribe", folder, file, "--task", "translat").stderr
    assert "unknown language 'xx'; available: de, en, fr" in run("transcribe", folder, file, "--language", "xx").stderr


@pytest.mark.parametrize("command", ["presets", "study", "list"])
def test_lists_fit_a_narrow_terminal_and_keep_names_whole(run, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    lines = run(command).stdout.splitlines()
    assert max(map(len, lines)) <= 60
    words = {word for line in lines for word in line.split()}
    assert {"presets": {"llama-3.1-405b", "gpt2-xl"}, "study": {"bottleneck"}, "list": {"capitals"}}[command] <= words


def test_studies_are_listed_and_run(run, tmp_path):
    assert re.search("^mask +Where the causal mask belongs +A5, D1, D2 *$", run("study").stdout, re.MULTILINE)
    assert len(json.loads(run("study", "--json").stdout)) == 13
    done = run("study", "scale", "--smoke", "--out", tmp_path / "scale")
    assert done.stdout == "scale: smoke run, too small to conclude anything; it ran without an error\n"
    assert {path.name for path in (tmp_path / "scale").iterdir()} == {"picture.png", "table.json", "index.html"}
    assert "already exists" in run("study", "scale", "--smoke", "--out", tmp_path / "scale").stderr
    assert "did you mean 'mask'" in run("study", "maks").stderr
