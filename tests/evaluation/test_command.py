"""`clearhead eval` as a user meets it: a table or JSON on stdout, one sentence on stderr for what is wrong."""

import gzip
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from clearhead.api import Model, load
from clearhead.catalog import store
from clearhead.cli import main
from clearhead.cli.evaluate import OPTIONS
from clearhead.evaluation.answers import MAX_NEW_TOKENS, answers, pairs, translation
from clearhead.evaluation.likelihood import BATCH_TOKENS
from clearhead.evaluation.perplexity import perplexity
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
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        return SimpleNamespace(returncode=left.value.code or 0, stdout=out, stderr=err)

    return evaluate


def told(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_perplexity(run, folder, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    asked = ("--task", "perplexity", "--text", tmp_path / "text.txt", "--context", 32, "--stride", 8)
    expected = perplexity(load(folder), TEXT, 32, 8)
    assert told(run(*asked, "--json")) == {"model": str(folder)} | expected.as_dict()
    shown = run(*asked).stdout
    assert f"{expected['perplexity']:,.4f}" in shown
    assert "stride: 8" in shown


def test_questions(run, tmp_path, monkeypatch):
    rows = [
        {"doc_id": number, "label": 1, "doc": {"query": "A"}, "request": {"context": "A", "continuation": choice}}
        for number in range(3)
        for choice in (" b", " cd")
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "piqa.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    monkeypatch.setattr(store, "get", lambda name, progress: tmp_path)
    found = told(run("--task", "piqa", "--limit", 2, "--json"))
    assert found["examples"] == 2
    assert set(found["measures"]) == {"accuracy", "accuracy_normalised"}


def test_translation(run, tmp_path):
    (tmp_path / "a.en").write_text("one\ntwo\nthree\n")
    (tmp_path / "a.de").write_text("eins\nzwei\ndrei\n")
    asked = ("--task", "translation", "--source", tmp_path / "a.en", "--target", tmp_path / "a.de", "--json")
    found = told(run(*asked, "--beams", 2, "--max-new-tokens", 5, "--limit", 2, model="capitals"))
    expected = translation(load("capitals"), [("one", "eins"), ("two", "zwei")], beams=2, max_new_tokens=5)
    assert found == {"model": "capitals"} | expected.as_dict()
    refused = run(*asked)
    assert refused.returncode == 1
    assert "translation is for an encoder-decoder" in refused.stderr


def test_pairs(run, folder, tmp_path):
    (right,), _ = answers(load(folder), ["one"], max_new_tokens=4)
    rows = [("one", " ".join(right.split())), ("two", "zwei")]
    (tmp_path / "a.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in rows))
    found = told(run("--task", "pairs", "--table", tmp_path / "a.tsv", "--max-new-tokens", 4, "--json"))
    assert found == {"model": str(folder)} | pairs(load(folder), rows, max_new_tokens=4).as_dict()
    assert found["measures"]["exact_match"]["value"] >= 0.5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--task", "perplexty"), "did you mean 'perplexity'?"),
        (("--task", "perplexity"), "perplexity needs --text, a file to read"),
        (("--task", "perplexity", "--text", "nowhere.txt"), "nowhere.txt cannot be read"),
        (("--task", "perplexity", "--text", "x", "--limit", 3), "--limit has no effect on perplexity"),
        (("--task", "piqa", "--beams", 3), "--beams has no effect on piqa"),
        (("--task", "piqa", "--limit", 0), "--limit is 0; it must be 1 or more"),
        (("--task", "translation", "--source", "a"), "translation needs --target"),
        (("--task", "pairs", "--table", "a", "--max-new-tokens", -1), "--max-new-tokens is -1"),
    ],
)
def test_wrong_input_is_one_sentence(run, arguments, said):
    done = run(*arguments)
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stdout == ""


def test_the_help_says_the_defaults_that_hold(run):
    shown = " ".join(run("--help").stdout.replace("│", " ").split())
    assert f"Tokens read at once; {BATCH_TOKENS}." in shown
    assert f"The longest answer; {MAX_NEW_TOKENS}." in shown
    assert f"{translation.__defaults__[0]} for translation, else {pairs.__defaults__[1]}." in shown
    assert all(task in shown for task in OPTIONS)


def test_help_brings_no_torch():
    code = "import sys, clearhead.cli.evaluate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
