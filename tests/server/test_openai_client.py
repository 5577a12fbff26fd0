"""OpenAI's own client, with strict validation of every answer."""

import openai
import pytest

from tests.server.toys import CHAT, LETTERS, serve, toy_model


@pytest.fixture(scope="module")
def client():
    with (
        serve(toy_model(), api_keys=("key",)) as server,
        openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="key", max_retries=0, _strict_response_validation=True
        ) as client,
    ):
        yield client


def loose(client):
    """Return a client without strict validation, for what its own types do not allow.

    These are null before the last chunk of a completion, and base64 of embeddings.
    """
    return openai.OpenAI(base_url=client.base_url, api_key="key", max_retries=0)


def test_chats_validate(client):
    options = {"model": "toy", "messages": CHAT, "logit_bias": LETTERS, "max_completion_tokens": 6, "seed": 1}
    answer = client.chat.completions.create(**options, n=2, logprobs=True, top_logprobs=2)
    text = answer.choices[0].message.content
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * 2
    assert "".join(token.token for token in answer.choices[0].logprobs.content) == text
    with client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}) as chunks:
        received = list(chunks)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in received[:-1]) == text
    assert received[-1].usage.completion_tokens == 6


def test_completions_validate(client):
    options = {"model": "toy", "prompt": "Hello", "logit_bias": LETTERS, "max_tokens": 6, "seed": 1}
    answer = client.completions.create(**options, logprobs=2)
    assert "".join(answer.choices[0].logprobs.tokens) == answer.choices[0].text
    with loose(client).completions.create(**options, stream=True) as chunks:
        assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text


def test_responses_validate(client):
    answer = client.responses.create(model="toy", input="Hello", max_output_tokens=5, temperature=0)
    assert answer.status == "incomplete"
    with client.responses.create(model="toy", input="Hello", max_output_tokens=5, temperature=0, stream=True) as events:
        received = list(events)
    assert received[-1].response.output_text == answer.output_text


def test_embeddings_and_models_validate(client):
    vectors = loose(client).embeddings.create(model="toy", input=["Hello", "World"]).data  # asks for base64
    plain = client.embeddings.create(model="toy", input="Hello", encoding_format="float").data
    assert vectors[0].embedding == pytest.approx(plain[0].embedding, abs=0)
    assert [model.id for model in client.models.list()] == ["toy", "alias"]
    assert client.models.retrieve("toy").owned_by == "clearhead"


def test_errors_have_the_classes_of_the_client(client):
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=CHAT)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="toy", messages=CHAT, temperature=3)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
