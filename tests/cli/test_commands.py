"""Test the command line: data on stdout, one-line errors on stderr, exit codes.

Most tests call the entry point in this process; a few start a subprocess.
"""

import io
import json
import math
import os
import resource
import shutil
import subprocess
import sys
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from clearhead.api import DTYPES, Model, create
from clearhead.catalog import DownloadError
from clearhead.checkpoint import Weights
from clearhead.checkpoint.huggingface import save_folder
from clearhead.checkpoint.native import save_native
from clearhead.cli import main
from clearhead.cli.app import print_json
from clearhead.cli.checks import DTYPE_NAMES, WEIGHTS
from clearhead.errors import ClearheadError
from clearhead.evaluation import evaluate_perplexity
from clearhead.families.gpt import gpt_config
from clearhead.families.gpt_style import multi_head_attention
from clearhead.model.recurrent import RecurrentConfig, RecurrentTranslator
from clearhead.tokenization.characters import byte_tokenizer, character_tokenizer
from tests.checkpoint.tiny import tiny_network


@pytest.fixture
def clearhead(monkeypatch, capsys):
    """Return a function that runs one command; `stdin` is its standard input."""

    def run(*arguments, stdin=""):
        monkeypatch.setattr(sys, "argv", ["clearhead", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as exit_info:
            main()
        out, err = capsys.readouterr()
        return SimpleNamespace(returncode=exit_info.value.code or 0, stdout=out, stderr=err)

    return run


def process(*arguments, **options):
    command = [sys.executable, "-m", "clearhead", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


@pytest.fixture
def folder(tmp_path):
    save_folder(tiny_network(), tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.fixture(scope="module")
def text_generator(tmp_path_factory):
    """A model of bytes with a context of 64, and the folder it is saved in."""
    tokenizer = byte_tokenizer()
    model = Model(tiny_network(vocab_size=tokenizer.vocab_size), tokenizer)
    return model, model.save(tmp_path_factory.mktemp("text_generator") / "bytes")


# --- in a subprocess


def test_help_takes_less_than_half_a_second():
    """Measure processor time, which does not depend on the load of the machine."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert process("--help").returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


def test_generate_reads_a_pipe_in_a_subprocess(text_generator):
    model, folder = text_generator
    done = process("generate", folder, "-", "--max-new-tokens", 5, "--json", input="Hello\n")
    assert done.returncode == 0
    assert json.loads(done.stdout)["tokens"] == model.generate("Hello", max_new_tokens=5).tokens


def test_an_error_in_a_subprocess_is_one_line():
    done = process("generate", "gpt2", "hello")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: gpt2 is a preset")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("closed", "arguments", "code", "err"),
    [
        ("<&-", ["-"], 1, "error: the text is empty; give at least one token\n"),
        (">&-", ["Hello"], 0, ""),
        ("2>&-", ["Hello", "--stop", ""], 1, ""),
    ],
)
def test_closed_standard_streams_are_treated_as_empty(text_generator, closed, arguments, code, err):
    command = [
        sys.executable,
        "-m",
        "clearhead",
        "generate",
        str(text_generator[1]),
        *arguments,
        "--max-new-tokens",
        "3",
    ]
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", *command]
    done = subprocess.run(shell, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", err)


def test_input_that_is_not_utf8_gives_a_one_line_error(text_generator, tmp_path):
    (tmp_path / "latin.txt").write_bytes("déjà vu\n".encode("latin-1"))
    with (tmp_path / "latin.txt").open() as file:
        strictly = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}
        done = process("generate", text_generator[1], "-", stdin=file, env=strictly)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(r"error: the text 'd\udce9j\udce0 vu' cannot be encoded: ")
    assert done.stderr.count("\n") == 1


def test_characters_that_the_terminal_cannot_encode_are_escaped():
    done = process("book", env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\u2212" in done.stdout  # the minus sign


# --- models


@pytest.mark.parametrize(
    "command", ["show", "get", "convert", "generate", "presets", "verify", "score", "embed", "trace", "book"]
)
def test_every_command_has_help_with_an_example(clearhead, command):
    done = clearhead(command, "--help")
    assert done.returncode == 0
    assert f"clearhead {command}" in done.stdout
    assert "--json" in done.stdout


def test_show_a_preset_and_a_folder(clearhead, folder):
    assert "8,030,261,248 parameters" in clearhead("show", "llama-3.1-8b").stdout
    output = json.loads(clearhead("show", folder, "--json").stdout)
    assert output["config"]["width"] == 16
    assert output["parameters"] == sum(output["parts"].values())


def test_presets_as_json(clearhead):
    output = json.loads(clearhead("presets", "--json").stdout)
    assert "gpt2-xl" in [name for names in output.values() for name in names]


def test_get_lists_the_catalog(clearhead):
    names = [row["name"] for row in json.loads(clearhead("get", "--json").stdout)]
    assert {"smollm2", "capitals", "evaluation-sets"} < set(names)


@pytest.mark.parametrize("kind", ["native", "huggingface"])
def test_convert(clearhead, folder, tmp_path, kind):
    done = clearhead("convert", folder, tmp_path / "out", "--to", kind, "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["format"] == kind
    assert json.loads(clearhead("show", tmp_path / "out", "--json").stdout)["config"]["width"] == 16
    again = ("convert", folder, tmp_path / "out", "--to", kind)
    refused = clearhead(*again)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "out already exists; choose another folder or add --overwrite" in refused.stderr
    assert clearhead(*again, "--overwrite").returncode == 0


def test_the_name_of_the_file_to_write_says_that_it_is_a_gguf_file(clearhead, folder, tmp_path):
    """Without this, a folder for transformers would be called model.gguf."""
    path = tmp_path / "model.gguf"
    done = clearhead("convert", folder, path, "--type", "f16", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["type"] == "f16"
    assert path.read_bytes()[:4] == b"GGUF"
    refused = clearhead("convert", folder, tmp_path / "packed.gguf", "--weights", "int4")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "for --to gguf, choose the format with --type" in refused.stderr


@pytest.mark.slow
def test_convert_to_onnx(clearhead, folder, tmp_path):
    path = tmp_path / "model.onnx"
    done = clearhead("convert", folder, path, "--to", "onnx", "--json")
    assert json.loads(done.stdout) == {"file": str(path), "format": "onnx", "files": ["model.onnx"]}
    assert path.stat().st_size > 10_000
    assert "already exists" in clearhead("convert", folder, path, "--to", "onnx").stderr
    assert "use .onnx" in clearhead("convert", folder, tmp_path / "model", "--to", "onnx").stderr


# --- invalid input


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("show", "llama-3.1-8bb"), "unknown model 'llama-3.1-8bb'; did you mean 'llama-3.1-8b', "),
        (("generate", "llama-3.1-8bb", "x"), "'llama-3.1-8bb'; `clearhead list` lists models with weights"),
        (("show", "no/such/folder"), "no/such/folder does not exist"),
        (("get", "smolm2"), "did you mean 'smollm2'"),
        (("generate", "gpt2", "hello"), "gpt2 is a preset, an architecture without weights"),
        (("generate", "MODEL", ""), "the text is empty"),
        (("generate", "MODEL", "x", "--temperature", "nan"), "temperature is nan"),
        (("generate", "MODEL", "x", "--temperature", "-1"), "temperature is -1"),
        (("generate", "MODEL", "x", "--top-p", "0"), "--top-p is 0"),
        (
            ("generate", "MODEL", "x", "--top-p", "0.9"),
            "--top-p has no effect at --temperature 0, which takes the most likely token; "
            "to sample, use --temperature 1",
        ),
        (
            ("generate", "MODEL", "x", "--n", "2"),
            "n is 2, but at --temperature 0 all texts would be the same; to sample, use --temperature 1",
        ),
        (("chat", "MODEL", "--temperature", "0", "--seed", "1"), "seed has no effect at --temperature 0"),
        (("generate", "MODEL", "x", "--weights", "int2"), "did you mean 'int8'? Available: full, int4, int8, stored"),
        (("chat", "MODEL", "--weights", "int2"), "unknown weights 'int2'"),
        (("generate", "MODEL", "x", "--max-new-tokens", "-1"), "--max-new-tokens is -1"),
        (("generate", "MODEL", "x", "--stop", ""), "stop contains ''"),
        (("generate", "MODEL", "x", "--stop-id", "999"), "--stop-id contains token 999"),
        (("generate", "MODEL", "x", "--logit-bias", "7"), "--logit-bias is '7'; it must be a token id and a number"),
        (("generate", "MODEL", "x", "--logit-bias", "999=1"), "--logit-bias contains token 999"),
        (("generate", "MODEL", "x", "--n", "0"), "n is 0"),
        (("generate", "MODEL", "x", "--beams", "2", "--top-k", "3"), "--top-k has no effect with --beams"),
        (("generate", "MODEL", "x", "--length-penalty", "2"), "--length-penalty has no effect without --beams"),
        (("generate", "MODEL", "x", "--logprobs", "1"), "--logprobs needs --json"),
        (("generate", "MODEL", "x", "--speculate", "no/such"), "no/such"),
        (("generate", "MODEL", "x", "--speculate", "lokup"), "did you mean 'lookup'?"),
        (("score", "MODEL"), "give one of the two"),
        (("score", "MODEL", "x", "--file", "x"), "give one of the two"),
        (("score", "MODEL", "--file", "no/such"), "no/such does not exist; check the path"),
        (
            ("score", "MODEL", "--file", "no:100:such"),
            "no:100:such does not exist; check the path",
        ),  # not an emoji's name
        (("score", "MODEL", "x"), "a text of fewer than two tokens cannot be scored"),
        (("embed", "MODEL", ""), "the text is empty"),
        (("trace", "MODEL", "x", "--head", "-9"), "--head -9 is out of range"),
        (("generate", "no-model", "x", "--top-k", "0"), "--top-k is 0"),  # checked before the model is loaded
        (("chat", "MODEL"), "no chat template"),
        (("chat", "MODEL", "--min-p", "2"), "--min-p is 2"),
    ],
)
def test_invalid_input_gives_a_one_line_error(clearhead, text_generator, arguments, sentence):
    done = clearhead(*(text_generator[1] if argument == "MODEL" else argument for argument in arguments))
    assert done.returncode == 1
    assert done.stdout == ""
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1
    for word in ("model.", "clearhead.", "=", "None"):  # no Python syntax in the errors of commands
        assert word not in done.stderr.replace("42=-1.5", "").replace(str(text_generator[1]), "")


def test_errors_of_convert_and_generate(clearhead, folder, tmp_path):
    assert clearhead("convert", folder, tmp_path / "out", "--to", "pickle").returncode == 1
    (tmp_path / "file").touch()
    for options in ((), ("--overwrite",)):
        assert (
            "file is a file; give a folder to write" in clearhead("convert", folder, tmp_path / "file", *options).stderr
        )
    no_text = clearhead("generate", folder, "hello")
    assert no_text.returncode == 1
    assert "this model has no tokenizer" in no_text.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("show",), "error: missing argument 'MODEL' (see clearhead show --help)"),
        (("shwo",), "error: unknown command 'shwo'; did you mean 'show'? (see clearhead --help)"),
        (("show", "gpt2", "--jsn"), "error: unknown option --jsn; did you mean --json? (see clearhead show --help)"),
        (("create", "gpt2", "--seed", "-1"), "error: --seed must be 0 or more (see"),
        (("train",), "error: train needs a recipe, such as"),
        (("train", "capitals"), "error: train needs a folder for the run; add --out runs/capitals (see"),
        (
            ("generate", "gpt2", "x", "--temperature", "hot"),
            "error: --temperature must be a number (see clearhead generate --help)",
        ),
        (("tokenizer", "trian"), "(see clearhead tokenizer --help)"),
    ],
)
def test_a_command_line_that_does_not_parse_gives_a_one_line_error(clearhead, arguments, words):
    done = clearhead(*arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert words in done.stderr


def test_no_arguments_print_the_help(clearhead):
    done = clearhead()
    assert (done.returncode, done.stderr) == (2, "")
    assert "presets" in done.stdout


def test_a_draft_model_may_have_a_name_similar_to_lookup(clearhead, text_generator, monkeypatch):
    _, folder = text_generator
    monkeypatch.setattr("clearhead.checkpoint.locations.fetch_from_hub", lambda name, wanted: folder)
    assert clearhead("generate", folder, "x", "--max-new-tokens", 3, "--speculate", "me/lookup").returncode == 0


def test_a_vocabulary_smaller_than_requested_prints_a_note(clearhead, tmp_path):
    (tmp_path / "corpus.txt").write_text("to be or not to be")
    arguments = ("tokenizer", "train", tmp_path / "corpus.txt", "--out", tmp_path / "out")
    assert clearhead(*arguments).stderr == "error: a bpe tokenizer needs a --vocab-size, such as 8000\n"
    done = clearhead(*arguments, "--vocab-size", 9000, "--json")
    size = json.loads(done.stdout)["vocab_size"]
    assert done.stderr == f"note: the texts yield only {size} of the requested 9,000 tokens\n"


def test_weight_names_in_cli_match_checkpoint_weights():
    assert get_args(Weights) == WEIGHTS
    assert tuple(DTYPES) == DTYPE_NAMES


@pytest.mark.parametrize("arguments", [("--debug", "show", "nothing"), ("show", "nothing", "--debug")])
def test_debug_raises_the_error_before_or_after_the_command(monkeypatch, arguments):
    monkeypatch.setattr(sys, "argv", ["clearhead", *arguments])
    with pytest.raises(ClearheadError, match="unknown model 'nothing'"):
        main()


def test_version(clearhead):
    assert clearhead("--version").stdout.strip().count(".") == 2


# --- generate


def test_text_is_streamed_while_it_is_generated(clearhead, text_generator):
    model, folder = text_generator
    expected = model.generate("Hello", max_new_tokens=20)
    assert clearhead("generate", folder, "Hello", "--max-new-tokens", 20).stdout == expected.text + "\n"


def test_a_piped_prompt_loses_one_final_newline(clearhead, text_generator):
    model, folder = text_generator
    output = json.loads(clearhead("generate", folder, "-", "--max-new-tokens", 3, "--json", stdin="Hi\n\n").stdout)
    assert output["prompt"] == "Hi\n"
    assert output["tokens"] == model.generate("Hi\n", max_new_tokens=3).tokens


OPTIONS = {
    "temperature": 0.9,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.01,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.1,
    "min_new_tokens": 9,
    "max_new_tokens": 12,
    "seed": 5,
}


def test_characters_without_a_token_print_a_note(tmp_path):
    tokenizer = character_tokenizer("helo")
    folder = Model(tiny_network(vocab_size=tokenizer.vocab_size), tokenizer).save(tmp_path / "letters")
    done = process("generate", folder, "Hello", "--max-new-tokens", 3, "--json")
    assert json.loads(done.stdout)["prompt"] == "Hello"
    assert done.stderr == "note: this model has no token for 'H' and reads an unknown token instead\n"


def test_every_sampling_option_is_passed_to_the_model(clearhead, text_generator, monkeypatch):
    model, folder = text_generator
    flags = [word for name, value in OPTIONS.items() for word in ("--" + name.replace("_", "-"), value)]
    flags += ["--stop", "q", "--stop", "zz", "--stop-id", 7, "--logit-bias", "65=2.5", "--logit-bias", "66=-1"]
    lists = {"stop": ("q", "zz"), "stop_ids": (7,), "logit_bias": ((65, 2.5), (66, -1.0)), "logprobs": 2}
    output = json.loads(clearhead("generate", folder, "Hello", *flags, "--logprobs", 2, "--json").stdout)
    made = model.generate("Hello", **OPTIONS, **lists)
    assert (output["tokens"], output["text"], output["finish_reason"]) == (made.tokens, made.text, made.finish_reason)
    assert output["logprobs"] == pytest.approx(made.logprobs, abs=1e-5)
    passed = {}
    monkeypatch.setattr(Model, "generate_many", lambda self, prompts, n, **options: passed.update(options) or [made])
    clearhead("generate", folder, "Hello", *flags, "--logprobs", 2, "--json")
    assert passed == OPTIONS | lists


def test_chat_and_generate_have_the_same_options():
    from clearhead.cli.sampling import OPTIONS as TABLE
    from clearhead.options import SamplingOptions

    assert TABLE.keys() | {"logprobs"} == SamplingOptions.__dataclass_fields__.keys()
    for command in ("generate", "chat"):
        shown = process(command, "--help", env={"COLUMNS": "200", "PATH": ""}).stdout
        assert all(f"--{name.replace('_', '-').removesuffix('s')}" in shown for name in TABLE)
        assert all(group in shown for group in ("Length", "Sampling", "Penalties"))


def test_several_texts(clearhead, text_generator):
    model, folder = text_generator
    arguments = ("generate", folder, "Hello", "--n", 3, "--temperature", 1, "--seed", 2, "--max-new-tokens", 9)
    made = model.generate_many(["Hello"], n=3, temperature=1.0, seed=2, max_new_tokens=9)
    assert [row["text"] for row in json.loads(clearhead(*arguments, "--json").stdout)] == [text.text for text in made]
    assert clearhead(*arguments).stdout == "".join(f"[{n}] {text.text}\n" for n, text in enumerate(made, start=1))


def test_beams(clearhead, text_generator):
    model, folder = text_generator
    made = model.generate_many(["Hello"], n=2, beams=3, length_penalty=0.5, max_new_tokens=9)
    arguments = ("generate", folder, "Hello", "--beams", 3, "--length-penalty", 0.5, "--max-new-tokens", 9)
    output = json.loads(clearhead(*arguments, "--n", 2, "--json").stdout)
    assert [row["tokens"] for row in output] == [text.tokens for text in made]
    assert [row["score"] for row in output] == pytest.approx([text.score for text in made], rel=1e-6)
    assert clearhead(*arguments).stdout == made[0].text + "\n"


def test_speculation(clearhead, text_generator):
    _, folder = text_generator
    plain = clearhead("generate", folder, "to be to be", "--max-new-tokens", 20).stdout
    for speculation in ("lookup", folder):
        done = clearhead("generate", folder, "to be to be", "--max-new-tokens", 20, "--speculate", speculation)
        assert done.stdout == plain


def test_a_text_beyond_the_context_prints_a_note(clearhead, text_generator, tmp_path):
    _, folder = text_generator  # rotary positions, made for 64 tokens
    inside = clearhead("generate", folder, "x" * 50, "--max-new-tokens", 10, "--min-new-tokens", 10)
    beyond = clearhead("generate", folder, "x" * 50, "--max-new-tokens", 30, "--min-new-tokens", 30)
    assert inside.stderr == ""
    assert beyond.stderr.startswith("note: the text is longer than the model's context of 64 tokens")
    assert clearhead("score", folder, "x" * 64).stderr == ""
    assert clearhead("score", folder, "x" * 65).stderr == beyond.stderr
    tokenizer = byte_tokenizer()
    config = gpt_config(width=16, attentions=[multi_head_attention(16, 4)], vocab_size=tokenizer.vocab_size, context=32)
    learned = create(config, tokenizer).save(tmp_path / "learned")
    ended = clearhead("generate", learned, "x" * 20, "--max-new-tokens", 30, "--min-new-tokens", 30)
    note = "note: the text ends because the model's context of 32 tokens is full\n"
    assert (ended.returncode, ended.stderr) == (0, note)
    too_long = clearhead("generate", learned, "x" * 40)
    assert (too_long.returncode, too_long.stdout) == (1, "")
    assert "the text has 40 tokens; this model reads at most 32" in too_long.stderr


def test_a_recurrent_network_generates_text_and_json(clearhead, tmp_path):
    tokenizer = byte_tokenizer()
    sizes = {"source_vocab_size": tokenizer.vocab_size, "target_vocab_size": tokenizer.vocab_size, "context": 16}
    torch.manual_seed(0)
    network = RecurrentTranslator(RecurrentConfig(cell="gru", attention="none", embedding_width=6, width=8, **sizes))
    save_native(network, tmp_path, special_ids={"decoder_start_token_id": 1, "eos_token_id": 2})
    tokenizer.save(tmp_path)
    arguments = ("generate", tmp_path, "Hello", "--max-new-tokens", 5)
    text = json.loads(clearhead(*arguments, "--json").stdout)["text"]
    assert text
    assert clearhead(*arguments).stdout == text + "\n"


# --- score, embed


def test_scores_equal_those_of_the_model(clearhead, text_generator, tmp_path):
    model, folder = text_generator
    (tmp_path / "text.txt").write_text("café", encoding="utf-8")
    output = json.loads(clearhead("score", folder, "--file", tmp_path / "text.txt", "--json").stdout)
    expected = model.score("café")
    assert [token["id"] for token in output["tokens"]] == expected.tokens
    assert [token["logprob"] for token in output["tokens"][1:]] == pytest.approx(expected.logprobs, abs=1e-5)
    assert "".join(token["text"] for token in output["tokens"][:3]) == "caf"
    evaluated = {metric.name: metric.value for metric in evaluate_perplexity(model, "café").metrics}
    assert evaluated == pytest.approx({name: output[name] for name in ("perplexity", "bits_per_byte")}, rel=1e-5)
    piped = clearhead("score", folder, "-", stdin="café")
    assert piped.stdout == f"perplexity: {expected.perplexity:,.4f}\nbits per byte: {output['bits_per_byte']:.4f}\n"


def test_scoring_only_special_tokens_is_an_error(clearhead, text_generator, tmp_path):
    """A tokenizer may encode one letter as the letter and the end token."""
    folder = shutil.copytree(text_generator[1], tmp_path / "ending")
    data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    end = next(token for token in data["added_tokens"] if token["special"])
    name, text = end["content"], {"Sequence": {"id": "A", "type_id": 0}}
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [text, {"SpecialToken": {"id": name, "type_id": 0}}],
        "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {name: {"id": name, "ids": [end["id"]], "tokens": [name]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    assert "all tokens after the first are special tokens" in clearhead("score", folder, "a").stderr


def test_embeddings_equal_those_of_the_model(clearhead, text_generator):
    model, folder = text_generator
    expected = model.embed(["to be", "or"])
    output = json.loads(clearhead("embed", folder, "to be", "or", "--json").stdout)
    assert [row["text"] for row in output] == ["to be", "or"]
    torch.testing.assert_close(torch.tensor([row["embedding"] for row in output]), expected)
    lines = clearhead("embed", folder, "to be", "or").stdout.splitlines()
    torch.testing.assert_close(torch.tensor([[float(n) for n in line.split()] for line in lines]), expected)


# --- demo


def test_the_demo_suggests_only_commands_that_work_next(clearhead, monkeypatch):
    def unreachable(name, progress=None):
        raise DownloadError("there is no network")

    monkeypatch.setattr("clearhead.cli.demo.get", unreachable)
    done = clearhead("demo")
    assert done.returncode == 0
    assert "SmolLM2 could not be downloaded (there is no network)" in done.stdout
    (following,) = [line for line in done.stdout.splitlines() if line.startswith("Next: ")]
    assert "clearhead get smollm2" in following
    assert "generate smollm2" not in following


def test_json_has_neither_nan_nor_infinity(capsys):
    print_json({"perplexity": math.inf, "rows": [(1.5, math.nan)], "text": "NaN"})
    assert json.loads(capsys.readouterr().out) == {"perplexity": None, "rows": [[1.5, None]], "text": "NaN"}
