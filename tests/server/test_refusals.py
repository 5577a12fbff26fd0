"""Wrong requests get 4xx with OpenAI's error object, which names what is wrong, and the server stays alive."""

import json
import re

import pytest

from tests.server.toys import CHAT

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
WRONG_COMPLETIONS = {
    "prompt": [None, 5, {}, "", [], [[]], [1, "a"], [-1], [999], [[1], []], ["a", 1], [1.5], True, [None]],
    "n": [0, -1, 10**9, "2", 1.5, True],
    "temperature": [-1, 2.1, "hot", True, [1]],
    "top_p": [0, 2, -1, "all"],
    "top_k": [-2, 1.5],
    "min_p": [-0.1, 2],
    "max_tokens": [-1, 10**9, "5", 1.5],
    "logprobs": [-1, 21, True, "1"],
    "stop": ["", [""], [1], ["x"] * 17, "x" * 257, {}],
    "seed": [1.5, "1", 2**63],
    "logit_bias": [{"a": 1}, {"-1": 1}, {"99999": 1}, {"5": 101}, {"5": "x"}, [5], {"05": 1, "5": 1}, {"²": 1}],
    "stream": ["yes", 1],
    "stream_options": [{"include_usage": True}, "x"],
    "echo": ["yes"],
    "best_of": [2, 0],
    "suffix": ["end"],
    "presence_penalty": [3, "x"],
    "frequency_penalty": [-3],
    "repetition_penalty": [0, -1],
    "min_tokens": [17, -1],
    "stop_token_ids": [[-1], [9999], 5],
    "cache_salt": [5, ""],
    "user": [5],
    "store": [True],
    "skip_special_tokens": [False],
}
WRONG_MESSAGES = [
    *(None, "Hello", [], [{}], {}, [5], [{"role": 123}], [{"role": "user"}], [{"role": "king", "content": "x"}]),
    *([{"role": "user", "content": 5}], [{"role": "user", "content": None}], [{"content": "x"}]),
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}]}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": "x", "secret": 1}],
]
LEAKS = re.compile(r"/[\w.-]+/[\w.-]+\.py|Traceback|0x[0-9a-f]{6,}|File \"|site-packages")


def check_error(answer, *statuses):
    assert answer.status_code in statuses, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert not LEAKS.search(error["message"]), error["message"]
    assert answer.headers["x-request-id"]
    return error


@pytest.mark.parametrize("field", WRONG_COMPLETIONS)
def test_a_wrong_value_is_refused_and_named(server, field):
    for value in WRONG_COMPLETIONS[field]:
        error = check_error(server.post(COMPLETIONS, {"prompt": "Hi", field: value}), 400)
        assert (error["param"] or "").startswith(field), (value, error)
        says_why = ("text is empty", "token id 999 is out of range")
        assert any(each in error["message"] for each in (field, *says_why)), (value, error)
    assert server.get("/health").status_code == 200


@pytest.mark.parametrize("messages", WRONG_MESSAGES, ids=str)
def test_wrong_messages_are_refused(server, messages):
    error = check_error(server.post(CHATS, {"messages": messages}), 400)
    assert error["param"].startswith("messages")


def test_a_part_of_another_kind_is_named_by_its_kind(server):
    content = [{"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}]
    answer = server.post(CHATS, {"messages": [{"role": "user", "content": content}]})
    error = check_error(answer, 400)
    assert error["message"].startswith("messages[0].content[1].type is 'image_url'; it must be 'text'")
    assert error["param"] == "messages[0].content[1].type"


def test_allowed_values_are_written_as_json(server):
    for field, value, expected in [("store", True, "false"), ("modalities", ["audio"], '["text"]')]:
        body = {"messages": [{"role": "user", "content": "x"}], field: value}
        assert check_error(server.post(CHATS, body), 400)["message"].endswith(f"set it to {expected}")


def test_a_bias_outside_the_vocabulary_names_key_and_size(server):
    error = check_error(server.post(COMPLETIONS, {"prompt": "Hi", "logit_bias": {"257": 1}}), 400)
    assert error["message"] == "logit_bias has the key '257'; a key is a token id from 0 to 256"


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b"5", b'"x"', b"null", b'{"prompt": NaN}', b'{"prompt": "\xff"}', b"\x00", b"{" * 10_000),
        *(b'{"a":' * 5000, b"[" * 100_000, b'{"n": ' + b"9" * 5000 + b"}", b'{"prompt": "\\ud800"}'),
    ],
    ids=lambda body: repr(body[:12]),
)
def test_a_body_that_is_not_an_object_is_refused(server, body):
    for path in (COMPLETIONS, CHATS, "/v1/embeddings", "/v1/responses", "/tokenize", "/detokenize"):
        check_error(server.client.post(path, content=body, headers={"Content-Type": "application/json"}), 400)


def test_another_content_type_is_refused(server):
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        content = json.dumps({"prompt": "Hi"})
        check_error(server.client.post(COMPLETIONS, content=content, headers={"Content-Type": kind}), 415)
    accepted = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert server.client.post(COMPLETIONS, content=json.dumps({"prompt": "Hi"}), headers=accepted).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "Hi", "max_tokens": 1}),
        (CHATS, {"messages": CHAT, "max_tokens": 1}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 1}),
        ("/v1/embeddings", {"input": "Hi"}),
        ("/tokenize", {"prompt": "Hi"}),
    ],
)
def test_an_unknown_field_is_accepted_and_logged_once(server, caplog, path, body):
    """OpenAI's client sends new fields every month (A14)."""
    name = f"brand_new{path.replace('/', '_')}"
    for _ in range(2):
        assert server.post(path, {**body, name: {"x": 1}}).status_code == 200
    assert [name in record.getMessage() for record in caplog.records] == [True]


def test_a_misspelt_field_is_refused_with_the_nearest_name(server):
    error = check_error(server.post(COMPLETIONS, {"prompt": "Hi", "temprature": 1}), 400)
    assert (error["param"], error["code"]) == ("temprature", "unknown_parameter")
    assert "did you mean 'temperature'?" in error["message"]


def test_a_wrong_model_is_not_found(server):
    for path, body in (
        (COMPLETIONS, {"prompt": "Hi"}),
        (CHATS, {"messages": CHAT}),
        ("/v1/embeddings", {"input": "Hi"}),
    ):
        error = check_error(server.post(path, {**body, "model": "gpt-9"}), 404)
        assert error["code"] == "model_not_found"
        assert server.post(path, {**body, "model": "alias"}).status_code == 200
    check_error(server.get("/v1/models/gpt-9"), 404)
    check_error(server.get("/v1/models/../../etc/passwd"), 404)


def test_a_prompt_longer_than_the_context_names_the_sizes(server):
    context = server.service.max_length
    for fields in ({"prompt": "x" * (context + 1)}, {"prompt": "x" * (context - 5), "max_tokens": 6}):
        for stream in (False, True):
            error = check_error(server.post(COMPLETIONS, {**fields, "stream": stream}), 400)
            assert error["code"] == "context_length_exceeded"
            assert str(context) in error["message"]
            assert str(len(fields["prompt"])) in error["message"]
    assert server.post(COMPLETIONS, {"prompt": "x" * (context - 5), "max_tokens": 5}).status_code == 200
    long_chat = [{"role": "user", "content": "x" * context}]
    assert check_error(server.post(CHATS, {"messages": long_chat}), 400)["code"] == "context_length_exceeded"


def test_a_large_body_is_refused(server):
    limit = server.service.settings.limits.max_body_bytes
    check_error(server.post(COMPLETIONS, {"prompt": "x" * limit}), 413)

    def chunks():
        for _ in range(5):
            yield b" " * (1 << 20)

    headers = {"Content-Type": "application/json"}
    check_error(server.client.post(COMPLETIONS, content=chunks(), headers=headers), 413)


def test_other_paths_and_methods(server):
    check_error(server.get("/v1/nothing"), 404)
    check_error(server.get(COMPLETIONS), 405)
    check_error(server.client.delete("/v1/models"), 405)
    check_error(server.client.post("/health"), 405)


def test_wrong_fields_of_a_chat(server):
    cases = {
        "top_logprobs": {"top_logprobs": 2},
        "max_tokens": {"max_tokens": 0},
        "logprobs": {"logprobs": 3},
        "response_format": {"response_format": {"type": "xml"}},
    }
    for name, fields in cases.items():
        error = check_error(server.post(CHATS, {"messages": CHAT, **fields}), 400)
        assert error["param"].startswith(name)
    check_error(server.post(CHATS, {"messages": CHAT, "max_tokens": 5, "max_completion_tokens": 6}), 400)
    check_error(server.post(CHATS, {"messages": CHAT * 1025}), 400)
