"""Test `clearhead eval`: a table or JSON on stdout, one sentence on stderr for wrong input."""

import gzip
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from clearhead.api import Model, load
from clearhead.cli import main
from clearhead.cli.evaluate import OPTIONS
from clearhead.evaluation import evaluate_pairs, evaluate_perplexity, evaluate_translation
from clearhead.evaluation.answers import MAX_NEW_TOKENS, generate_answers
from clearhead.evaluation.likelihood import BATCH_TOKENS
from clearhead.tokenization.characters import byte_tokenizer
from tests.checkpoint.tiny import tiny_network

TEXT = "A letter posted in the morning crosses the river by noon, and the clerk knows nothing of it.\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tokenizer = byte_tokenizer()
    return Model(tiny_network(vocab_size=tokenizer.vocab_size), tokenizer).save(tmp_path_factory.mktemp("eval") / "m")


@pytest.fixture
def run(folder, monkeypatch, capsys):
    def evaluate(*arguments, model=folder):
        monkeypatch.setattr(sys, "argv", ["clearhead", "eval", str(model), *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_info:
            main()
        out, err = capsys.readouterr()
        return SimpleNamespace(returncode=exit_info.value.code or 0, stdout=out, stderr=err)

    return evaluate


def parse_output(process):
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def test_perplexity_prints_json_and_a_table(run, folder, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    arguments = ("--task", "perplexity", "--text", tmp_path / "text.txt", "--context", 32, "--stride", 8)
    expected = evaluate_perplexity(load(folder), TEXT, 32, 8)
    assert parse_output(run(*arguments, "--json")) == {"model": str(folder)} | expected.as_dict()
    shown = run(*arguments).stdout
    assert f"{expected['perplexity']:,.4f}" in shown
    assert "stride: 8" in shown


def test_multiple_choice_prints_json(run, tmp_path, monkeypatch):
    rows = [
        {"doc_id": number, "label": 1, "doc": {"query": "A"}, "request": {"context": "A", "continuation": choice}}
        for number in range(3)
        for choice in (" b", " cd")
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "piqa.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    monkeypatch.setattr("clearhead.catalog.get", lambda name, progress: tmp_path)
    data = parse_output(run("--task", "piqa", "--limit", 2, "--json"))
    assert data["examples"] == 2
    assert set(data["metrics"]) == {"accuracy", "accuracy_normalized"}


def test_translation_prints_json_and_needs_an_encoder_decoder(run, tmp_path):
    (tmp_path / "a.en").write_text("one\ntwo\nthree\n")
    (tmp_path / "a.de").write_text("eins\nzwei\ndrei\n")
    arguments = ("--task", "translation", "--source", tmp_path / "a.en", "--target", tmp_path / "a.de", "--json")
    data = parse_output(run(*arguments, "--beams", 2, "--max-new-tokens", 5, "--limit", 2, model="capitals"))
    expected = evaluate_translation(load("capitals"), [("one", "eins"), ("two", "zwei")], beams=2, max_new_tokens=5)
    assert data == {"model": "capitals"} | expected.as_dict()
    failed = run(*arguments)
    assert failed.returncode == 1
    assert "translation needs an encoder-decoder" in failed.stderr


def test_pairs_prints_json(run, folder, tmp_path):
    (answer,), _ = generate_answers(load(folder), ["one"], max_new_tokens=4)
    rows = [("one", " ".join(answer.split())), ("two", "zwei")]
    (tmp_path / "a.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in rows))
    data = parse_output(run("--task", "pairs", "--table", tmp_path / "a.tsv", "--max-new-tokens", 4, "--json"))
    assert data == {"model": str(folder)} | evaluate_pairs(load(folder), rows, max_new_tokens=4).as_dict()
    assert data["metrics"]["exact_match"]["value"] >= 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--task", "perplexty"), "did you mean 'perplexity'?"),
        (("--task", "perplexity"), "the task perplexity needs a file; add --text FILE"),
        (("--task", "perplexity", "--text", "nowhere.txt"), "nowhere.txt does not exist"),
        (("--task", "perplexity", "--text", "x", "--limit", 3), "--limit has no effect on the task perplexity"),
        (("--task", "piqa", "--beams", 3), "--beams has no effect on the task piqa"),
        (("--task", "piqa", "--limit", 0), "--limit is 0; it must be at least 1"),
        (("--task", "translation", "--source", "a"), "the task translation needs a file; add --target FILE"),
        (("--task", "pairs", "--table", "a", "--max-new-tokens", -1), "--max-new-tokens is -1"),
    ],
)
def test_wrong_input_prints_one_sentence(run, arguments, message):
    process = run(*arguments)
    assert process.returncode == 1
    assert message in process.stderr
    assert process.stdout == ""


def test_help_shows_the_actual_defaults(run):
    shown = " ".join(run("--help").stdout.replace("│", " ").split())
    assert f"tokens in a batch; by default {BATCH_TOKENS}." in shown
    assert f"tokens in an answer; by default {MAX_NEW_TOKENS}." in shown
    beams = evaluate_translation.__defaults__[0], evaluate_pairs.__defaults__[1]
    assert f"by default {beams[0]} for translation and {beams[1]} for pairs." in shown
    assert all(task in shown for task in OPTIONS)


def test_help_does_not_import_torch():
    code = "import sys, clearhead.cli.evaluate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
