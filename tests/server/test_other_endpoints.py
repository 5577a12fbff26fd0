"""/v1/models, /version, /tokenize, /detokenize, /tokenizer_info, /v1/embeddings and /openapi.json."""

import base64
import struct

import pytest
import torch

from clearhead.server.json_checks import check_value
from tests.server.toys import CHAT


def test_models_are_listed(server):
    data = server.get("/v1/models").json()
    assert data["object"] == "list"
    assert [model["id"] for model in data["data"]] == ["toy", "alias"]
    assert server.get("/v1/models/toy").json() == data["data"][0]
    assert data["data"][0]["max_model_len"] == server.service.max_length


def test_the_version_is_that_of_the_package(server):
    from importlib.metadata import version

    assert server.get("/version").json() == {"version": version("clearhead")}


def test_texts_and_conversations_are_tokenized(server):
    body = {"prompt": "Hé", "add_special_tokens": False, "return_token_strs": True}
    answer = server.post("/tokenize", body).json()
    assert answer["tokens"] == list("Hé".encode())
    assert (answer["count"], answer["max_model_len"]) == (3, server.service.max_length)
    assert len(answer["token_strs"]) == 3
    chat = server.post("/tokenize", {"messages": CHAT}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": chat}).json() == {"prompt": "[user]Hello\n[assistant]"}
    assert server.post("/tokenize", {"messages": CHAT, "add_generation_prompt": False}).json()["count"] == 12


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": CHAT}),
        ("/tokenize", {"prompt": 5}),
        ("/tokenize", {"messages": CHAT, "add_special_tokens": True}),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}),
        ("/detokenize", {"tokens": "x"}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [100_000]}),
        ("/detokenize", {}),
    ],
)
def test_wrong_requests_for_tokens_are_refused(server, path, body):
    assert server.post(path, body).status_code == 400


def test_the_tokenizer_is_described_as_lm_evaluation_harness_expects(server):
    info = server.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|endoftext|>"
    assert info["chat_template"] == server.service.model.tokenizer.chat_template
    assert {"bos_token", "pad_token"} <= info.keys()


def test_embeddings_equal_those_of_the_python_api_alone(server):
    texts = ["Hello", "A longer text", "x"]
    answer = server.post("/v1/embeddings", {"input": texts}).json()
    assert [each["index"] for each in answer["data"]] == [0, 1, 2]
    for text, found in zip(texts, answer["data"], strict=True):
        assert torch.equal(torch.tensor(found["embedding"]), server.service.model.embed([text])[0])
    assert answer["usage"] == {"prompt_tokens": 19, "total_tokens": 19}
    encoded = server.post("/v1/embeddings", {"input": list(b"Hello"), "encoding_format": "base64"}).json()
    content = base64.b64decode(encoded["data"][0]["embedding"])
    assert list(struct.unpack(f"<{len(content) // 4}f", content)) == answer["data"][0]["embedding"]


@pytest.mark.parametrize("body", [{}, {"input": []}, {"input": ""}, {"input": "x", "dimensions": 3}, {"input": [[]]}])
def test_wrong_requests_for_embeddings_are_refused(server, body):
    assert server.post("/v1/embeddings", body).status_code == 400


def test_a_text_that_is_too_long_to_embed_is_refused(server):
    answer = server.post("/v1/embeddings", {"input": "x" * (server.service.max_length + 1)})
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_the_openapi_document_describes_every_route(server):
    document = server.get("/openapi.json").json()
    from clearhead.server.routes import api_routes

    ours = {route.path.replace(":path", "") for route in api_routes(server.state)} - {"/openapi.json"}
    assert set(document["paths"]) == ours
    schema = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    check_value({"prompt": "x", "n": None, "temperature": 0.5}, schema, "body")
