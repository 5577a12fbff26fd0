"""What the commands show, trace, cost and verify do with the recurrent baseline."""

import io
import json
import sys
from types import SimpleNamespace

import pytest
import torch

from clearhead.checkpoint.native import save_native
from clearhead.cli import main
from clearhead.model.recurrent import RecurrentConfig, RecurrentTranslator
from clearhead.tokenization.characters import byte_tokenizer


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


@pytest.fixture
def recurrent_folder(tmp_path):
    """Return the folder of a small recurrent network with attention."""
    tokenizer = byte_tokenizer()
    sizes = {"source_vocab_size": tokenizer.vocab_size, "target_vocab_size": tokenizer.vocab_size, "context": 16}
    torch.manual_seed(0)
    config = RecurrentConfig(cell="gru", attention="dot_product", embedding_width=6, width=8, **sizes)
    save_native(
        RecurrentTranslator(config), tmp_path / "rnn", special_ids={"decoder_start_token_id": 1, "eos_token_id": 2}
    )
    tokenizer.save(tmp_path / "rnn")
    return tmp_path / "rnn"


def test_a_recurrent_network_is_shown(run, recurrent_folder):
    data = json.loads(run("show", recurrent_folder, "--json").stdout)
    assert data["config"]["cell"] == "gru"
    embeddings, head = 257 * 6, 257 * 8 + 257
    encoder, decoder = (3 * (inputs * 8 + 8 * 8 + 2 * 8) for inputs in (6, 6 + 8))
    expected = {"source embedding": embeddings, "target embedding": embeddings, "encoder": encoder, "decoder": decoder}
    assert data["parts"] == expected | {"head": head}
    shown = run("show", recurrent_folder).stdout
    assert f"recurrent encoder-decoder, {data['parameters']:,} parameters" in shown


def test_the_alignment_of_a_recurrent_network_is_traced(run, recurrent_folder, tmp_path):
    arguments = ("trace", recurrent_folder, "HI", "--source", "<U>hi")
    data = json.loads(run(*arguments, "--json").stdout)
    assert (data["attention"], data["keys"], len(data["queries"])) == ("alignment", list("<U>hi"), 3)
    assert run(*arguments).stdout.startswith("alignment, layer 0, one head;")
    assert [sum(row) for row in data["weights"][0]] == pytest.approx([1, 1, 1])
    assert "alignment, layer 0" in run(*arguments).stdout
    run(*arguments, "--out", tmp_path / "page.html")
    assert "alignment" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "no residual streams" in run(*arguments, "--out", tmp_path / "x.safetensors").stderr
    assert "needs a source" in run(*arguments[:3]).stderr


def test_cost_of_a_recurrent_network(run, recurrent_folder):
    data = json.loads(run("cost", recurrent_folder, "--batch", 2, "--context", 5, "--source", 7, "--json").stdout)
    encoder, decoder = (2 * 3 * 8 * (inputs + 8) for inputs in (6, 6 + 8))
    expected = {"encoder": 7 * encoder, "attention": 5 * 4 * 7 * 8, "decoder": 5 * decoder, "head": 5 * 2 * 8 * 257}
    assert data["flops_by_part"] == {name: 2 * flops for name, flops in expected.items()}
    assert data["flops"] == 2 * sum(expected.values())
    assert (data["sequential_steps"], data["source"], data["target"]) == (12, 7, 5)
    printed = run("cost", recurrent_folder, "--context", 5).stdout
    assert "sequential steps: 10, one per token" in printed
    assert "not on --device" in run("cost", recurrent_folder, "--device", "h200").stderr
    assert "not on --training-tokens" in run("cost", recurrent_folder, "--training-tokens", 9).stderr
    assert "not on --weights" in run("cost", recurrent_folder, "--weights", "int8").stderr


def test_a_recurrent_network_is_verified(run, recurrent_folder):
    done = run("verify", recurrent_folder, "--new-tokens", 6, "--json")
    results = json.loads(done.stdout)
    assert done.returncode == 0
    assert [result["verdict"] for result in results] == ["pass"] * 3
    assert "3 pass, in float32" in run("verify", recurrent_folder, "--new-tokens", 6).stdout
