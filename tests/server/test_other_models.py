"""Models that are no plain decoders: encoder-decoders, and those that the engine cannot run."""

import pytest

from clearhead.api import Model
from clearhead.architecture import DynamicScaling, Rope
from clearhead.tokenization import SpecialTokens, byte_tokenizer
from clearhead.tokenization.characters import character_tokenizer
from tests.checkpoint.tiny import tiny_network
from tests.model.toys import encoder, toy, translator
from tests.server.toys import LETTERS, NAME, serve

TOKENIZER = character_tokenizer("abcdefghijklmnopqrstuvwxyz", SpecialTokens(unknown="?", eos="."))  # fits the toys


def test_an_encoder_only_embeds():
    with serve(Model(toy(encoder()), TOKENIZER)) as server:
        assert server.post("/v1/embeddings", {"input": "hi"}).status_code == 200
        answer = server.post("/v1/completions", {"prompt": "hi"})
        assert answer.status_code == 400
        assert "use /v1/embeddings" in answer.json()["error"]["message"]
        assert server.get("/metrics").status_code == 200
        assert server.get("/tokenizer_info").status_code == 200


def test_an_encoder_decoder_answers_completions():
    ids = {"decoder_start_token_id": 0, "eos_token_id": TOKENIZER.eos_id}
    model = Model(toy(translator()), TOKENIZER, special_ids=ids)
    with serve(model) as server:
        answer = server.complete("hello", temperature=0, max_tokens=6, logit_bias={})
        assert answer["choices"][0]["text"] == model.generate("hello", max_new_tokens=6).text
        assert answer["usage"]["prompt_tokens"] == 5
        events = server.events("/v1/completions", {"prompt": "hello", "temperature": 0, "max_tokens": 6})
        assert "".join(event["choices"][0]["text"] for event in events) == answer["choices"][0]["text"]
        assert server.post("/v1/completions", {"prompt": "hello", "echo": True}).status_code == 400
        assert server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}).status_code == 400
        assert server.post("/v1/completions", {"prompt": "x" * 33}).status_code == 400
        server.wait_until_idle()


@pytest.fixture(scope="module")
def sequential():
    """A server with a model whose rotations depend on the length of the text."""
    tokenizer = byte_tokenizer()
    rope = Rope(scaling=DynamicScaling(factor=2.0, original_context=16))
    model = Model(tiny_network(vocab_size=tokenizer.vocab_size, context=256, rope=rope), tokenizer)
    with serve(model) as running:
        yield running
        running.wait_until_idle()


def test_a_model_without_the_engine_is_served_text_by_text(sequential):
    model = sequential.service.model
    bias = {int(token): value for token, value in LETTERS.items()}
    answer = sequential.complete(["Hello", "World"], temperature=0.5, seed=3, max_tokens=30, logprobs=1)
    for choice, prompt in zip(answer["choices"], ("Hello", "World"), strict=True):
        ours = model.generate(prompt, temperature=0.5, seed=3, max_new_tokens=30, logit_bias=bias)
        assert choice["text"] == ours.text
        assert "".join(choice["logprobs"]["tokens"]) == ours.text
    assert answer["model"] == NAME
    events = sequential.events("/v1/completions", {"prompt": "x", "max_tokens": 3, "logit_bias": LETTERS, "seed": 1})
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert sequential.complete(max_tokens=0)["choices"][0]["text"] == ""
    stopped = sequential.complete(temperature=0, max_tokens=20, stop=sequential.text(temperature=0)[3])
    assert stopped["choices"][0]["finish_reason"] == "stop"
    refused = sequential.post("/v1/completions", {"prompt": "x", "echo": True, "logprobs": 1})
    assert refused.status_code == 400
    assert "without the engine" in refused.json()["error"]["message"]
