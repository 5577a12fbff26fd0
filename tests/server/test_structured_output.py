"""response_format: texts that parse and follow their schema; wrong schemas are refused and harm nobody (A24)."""

import json

import pytest

from tests.server.toys import CHAT, serve, toy_model

pytest.importorskip("llguidance", reason="the extra grammar is not installed")

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def ask(server, response_format, **fields):
    return server.post("/v1/chat/completions", {"messages": CHAT, "response_format": response_format, **fields})


def schema_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_follows_its_schema(server, seed):
    answer = ask(server, schema_format(PERSON), seed=seed, n=2).json()
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    for choice, text in zip(answer["choices"], texts, strict=True):
        assert choice["finish_reason"] == "stop"
        person = json.loads(text)
        assert set(person) == {"name", "age"}
        assert isinstance(person["name"], str)
        assert 0 <= person["age"] <= 99
    assert texts[0] != texts[1]
    enum = ask(server, schema_format({"enum": ["red", "green"]}), seed=seed).json()
    assert json.loads(enum["choices"][0]["message"]["content"]) in ("red", "green")


def test_a_stream_and_responses_follow_it_too(server):
    body = {"messages": CHAT, "response_format": schema_format(PERSON), "seed": 1}
    events = server.events("/v1/chat/completions", body)
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert text == ask(server, schema_format(PERSON), seed=1).json()["choices"][0]["message"]["content"]
    answer = server.post(
        "/v1/responses",
        {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "x", "schema": PERSON}}, "temperature": 0.7},
    ).json()
    assert set(json.loads(answer["output"][0]["content"][0]["text"])) == {"name", "age"}


def test_any_object(server):
    answer = ask(server, {"type": "json_object"}, temperature=0, max_tokens=60).json()["choices"][0]
    assert answer["message"]["content"].lstrip().startswith("{")
    assert ask(server, {"type": "text"}, max_tokens=1).status_code == 200


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense"},
        {"type": "string", "pattern": "(("},
        {"$ref": "#/nowhere"},
        {"$ref": "https://example.org/schema.json"},
        {"type": "object", "properties": 5},
        {"type": "string", "minLength": 5, "maxLength": 2},
        False,
    ],
    ids=str,
)
def test_a_wrong_schema_is_refused(server, schema):
    answer = ask(server, schema_format(schema))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith("response_format")
    assert server.text(max_tokens=2)


def test_a_large_schema_is_refused(server):
    large = {"enum": ["x" * 1000 + str(number) for number in range(100)]}
    assert ask(server, schema_format(large)).status_code == 400


def test_formats_need_a_token_that_ends_a_text(server):
    assert ask(server, {"type": "json_object"}, ignore_eos=True).status_code == 400
    model = toy_model()
    model.tokenizer.stop_ids = frozenset()
    with serve(model) as other:
        answer = ask(other, {"type": "json_object"})
        assert answer.status_code == 400
        assert "no token that ends a text" in answer.json()["error"]["message"]
