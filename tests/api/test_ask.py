"""model.ask answers with the chat template; model.generate continues the text as it is."""

import pytest

from clearhead.api import Model, load
from clearhead.errors import ClearheadError
from clearhead.tokenization.chat_template import render_chat
from tests.api.test_chat import TemplateTokenizer, chat_model
from tests.api.test_model import byte_model


@pytest.mark.parametrize("system", [None, "Be kind."])
def test_ask_continues_the_rendered_message(system):
    model = chat_model()
    messages = [{"role": "system", "content": system}] if system else []
    prompt = render_chat(model.tokenizer, [*messages, {"role": "user", "content": "Hello"}])
    ids = model.tokenizer.encode(prompt, add_special_tokens=False)
    answer = model.ask("Hello", system=system, max_new_tokens=9)
    assert (answer.prompt_tokens, answer.tokens) == (ids, model.generate(ids, max_new_tokens=9).tokens)
    assert answer.text == model.chat(system=system).say("Hello", max_new_tokens=9)


def test_generate_does_not_apply_the_template():
    model = chat_model()
    assert model.generate("Hello", max_new_tokens=3).prompt_tokens == model.tokenizer.encode("Hello")


def test_ask_takes_the_options_of_generate():
    model, options = chat_model(), {"temperature": 1.0, "seed": 3, "top_k": 5, "max_new_tokens": 9}
    assert model.ask("Hello", **options) == model.generate(model.encode_chat("Hello"), **options)
    searched = model.ask("Hello", beams=2, max_new_tokens=5)
    assert searched == model.generate(model.encode_chat("Hello"), beams=2, max_new_tokens=5)


@pytest.mark.parametrize(
    ("model", "call", "message"),
    [
        (byte_model, lambda model: model.ask("Hello"), "this model has no chat template; use generate"),
        (chat_model, lambda model: model.ask(["Hello"]), "must be a text"),
        (chat_model, lambda model: model.ask("Hello", system=3), "must be a text"),
        (chat_model, lambda model: model.ask("Hello", n=2), "generate_many"),
    ],
)
def test_ask_raises_one_sentence(model, call, message):
    with pytest.raises(ClearheadError, match=message):
        call(model())


def test_only_a_decoder_with_a_template_has_one():
    assert chat_model().has_chat_template
    assert not byte_model().has_chat_template
    encoder_decoder = Model(load("capitals").network, TemplateTokenizer())
    assert not encoder_decoder.has_chat_template
    with pytest.raises(ClearheadError, match="decoder-only"):
        encoder_decoder.ask("Hello")


def test_smollm2_answers_a_question_that_it_does_not_continue(smollm2_gguf):
    model, question = load(smollm2_gguf), "What is the capital of France?"
    assert model.generate(question, max_new_tokens=16).text == ""
    assert "Paris" in model.ask(question, max_new_tokens=16).text
