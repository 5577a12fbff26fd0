"""`clearhead generate`: a chat model answers, --raw continues, the notes say which, and an empty text says why."""

import json
from dataclasses import replace

import pytest
import torch

from clearhead.api import Model, create
from clearhead.families import preset, shrink
from clearhead.generation import Generation
from clearhead.tokenization.characters import byte_tokenizer
from tests.api.test_chat import TemplateTokenizer, chat_model
from tests.checkpoint.tiny import tiny_network
from tests.cli.test_commands import clearhead  # noqa: F401  (a fixture)
from tests.parity.harness import randomize

ANSWERING = "note: answering with the chat template; --raw continues the text instead\n"
CONTINUING = "note: continuing the text; without --raw, the model answers with its chat template\n"
CUT_OFF = "note: the answer was cut off after 9 tokens; --max-new-tokens allows a longer one\n"


def byte_model():
    tokenizer = byte_tokenizer()
    return Model(tiny_network(vocab_size=tokenizer.vocab_size), tokenizer)


@pytest.fixture
def run(clearhead, monkeypatch):  # noqa: F811
    """Run generate with a model that is already loaded."""

    def run_with(model, *arguments, **options):
        monkeypatch.setattr("clearhead.cli.generate.load_model", lambda *names: model)
        monkeypatch.setattr("clearhead.cli.generate.check_model_options", lambda *names: None)
        return clearhead("generate", "any", *arguments, **options)

    return run_with


def test_a_chat_model_answers(run):
    model = chat_model()
    done = run(model, "Hello", "--max-new-tokens", 9)
    assert done.stdout == model.ask("Hello", max_new_tokens=9).text + "\n"
    assert done.stderr == ANSWERING + CUT_OFF


def test_a_system_message_is_part_of_the_template(run):
    model = chat_model()
    done = run(model, "Hello", "--system", "Be kind.", "--max-new-tokens", 9)
    assert done.stdout == model.ask("Hello", system="Be kind.", max_new_tokens=9).text + "\n"


def test_raw_continues_the_text(run):
    model = chat_model()
    done = run(model, "Hello", "--raw", "--max-new-tokens", 9)
    assert (done.stdout, done.stderr) == (model.generate("Hello", max_new_tokens=9).text + "\n", CONTINUING)


def test_json_says_whether_the_template_was_applied(run):
    model = chat_model()
    answer = json.loads(run(model, "Hello", "--json", "--max-new-tokens", 5).stdout)
    assert (answer["prompt"], answer["chat_template"]) == ("Hello", True)
    assert answer["prompt_tokens"] == model.encode_chat("Hello")
    continued = json.loads(run(model, "Hello", "--raw", "--json", "--max-new-tokens", 5).stdout)
    assert (continued["chat_template"], continued["prompt_tokens"]) == (False, model.encode("Hello"))


def test_several_answers(run):
    model = chat_model()
    done = run(model, "Hello", "--n", 2, "--temperature", 1, "--seed", 1, "--max-new-tokens", 5)
    made = model.generate_many([model.encode_chat("Hello")], 2, temperature=1.0, seed=1, max_new_tokens=5)
    assert done.stdout == "".join(f"[{number}] {one.text}\n" for number, one in enumerate(made, start=1))


def test_a_prompt_with_special_tokens_is_continued(run):
    model = chat_model()
    special = next(iter(model.tokenizer.special_ids))

    class Special(TemplateTokenizer):
        def encode(self, text, add_special_tokens=True):
            return [special if character == "@" else ord(character) for character in text]

    changed = type(model)(model.network, Special())
    done = run(changed, "@user", "--max-new-tokens", 3, "--json")
    assert json.loads(done.stdout)["chat_template"] is False
    assert done.stderr == "note: continuing the text, because it contains special tokens of the chat template\n"
    assert json.loads(run(changed, "user", "--max-new-tokens", 3, "--json").stdout)["chat_template"] is True


def test_a_model_without_a_template_continues_without_a_note(run):
    model = byte_model()
    done = run(model, "Hello", "--max-new-tokens", 5)
    assert (done.stdout, done.stderr) == (model.generate("Hello", max_new_tokens=5).text + "\n", "")


@pytest.mark.parametrize(
    ("model", "arguments", "words"),
    [
        (byte_model, ["--system", "x"], "has no chat template, so it reads no system message; leave out --system"),
        (chat_model, ["--system", "x", "--raw"], "give only one of them"),
    ],
)
def test_a_system_message_needs_the_template(run, model, arguments, words):
    done = run(model(), "Hello", *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("tokens", "text", "reason", "words"),
    [
        ([256], "", "stop", "the model ended at once with "),
        ([], "", "length", "the text is empty because --max-new-tokens is 0"),
        ([32, 32, 256], "  ", "stop", "the model generated only tokens that show no text: ' ' ' ' "),
    ],
)
def test_an_empty_text_says_why(run, monkeypatch, tokens, text, reason, words):
    model = byte_model()
    made = [Generation(tokens, text, [72], reason)]
    monkeypatch.setattr(type(model), "generate_many", lambda self, prompts, n, **options: made)
    done = run(model, "H", "--json")
    assert done.stderr.startswith(f"note: {words}")
    assert done.stderr.count("\n") == 1


def test_a_continued_prompt_is_shown_dim_on_a_terminal(run, monkeypatch):
    model = byte_model()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("clearhead.cli.word_wrap.is_terminal", lambda stream: True)
    monkeypatch.setattr("rich.console.Console.color_system", "standard", raising=False)
    done = run(model, "Hello", "--max-new-tokens", 5)
    assert done.stdout == f"\x1b[2mHello\x1b[0m{model.generate('Hello', max_new_tokens=5).text}\n"
    assert not run(chat_model(), "Hello", "--max-new-tokens", 5).stdout.startswith("\x1b[2m")


def test_smollm2_answers(clearhead, smollm2_gguf):  # noqa: F811
    done = clearhead("generate", smollm2_gguf, "What is the capital of France?", "--max-new-tokens", 16)
    assert "Paris" in done.stdout
    assert done.stderr == ANSWERING
    raw = clearhead("generate", smollm2_gguf, "What is the capital of France?", "--max-new-tokens", 16, "--raw")
    assert (raw.stdout, raw.stderr) == ("\n", CONTINUING + "note: the model ended at once with <|im_end|>\n")


def test_languages_are_tokens_of_the_source_and_of_the_text(run):
    tokenizer = byte_tokenizer(extra_tokens=("eng_Latn", "fra_Latn"))
    config = shrink(preset("nllb-200-600m"))
    stacks = {
        name: replace(stack, embedding=replace(stack.embedding, vocab_size=tokenizer.vocab_size))
        for name, stack in (("encoder", config.encoder), ("decoder", config.decoder))
    }
    torch.manual_seed(1)
    model = replace(create(replace(config, **stacks)), tokenizer=tokenizer)
    randomize(model.network)
    languages = {"source_language": "eng_Latn", "target_language": "fra_Latn"}
    options = ("--source-language", "eng_Latn", "--target-language", "fra_Latn", "--max-new-tokens", 6)
    done = run(model, "Hello", *options, "--json")
    expected = model.generate("Hello", max_new_tokens=6, **languages)
    assert json.loads(done.stdout)["tokens"] == list(expected.tokens)
    assert expected.tokens != model.generate("Hello", max_new_tokens=6, source_language="eng_Latn").tokens
    assert run(model, "Hello", *options).stdout.strip() == expected.text.strip()
    done = run(model, "Hello", "--target-language", "fr_Latn")
    assert "unknown language 'fr_Latn'; did you mean 'fra_Latn'?" in done.stderr
    assert "this model has no tokens for languages" in run(byte_model(), "a", "--target-language", "x").stderr
