"""/v1/responses: the stateless part, complete and as named events."""

import pytest

from tests.server.toys import CHAT, LETTERS

PATH = "/v1/responses"


def test_an_answer_is_that_of_a_chat(server):
    body = {"input": "Hello", "instructions": "Be kind.", "temperature": 0, "max_output_tokens": 6}
    answer = server.post(PATH, body).json()
    messages = [{"role": "system", "content": "Be kind."}, *CHAT]
    chat = server.chat(messages, temperature=0, max_tokens=6, logit_bias={})
    (item,) = answer["output"]
    assert item["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert (answer["object"], answer["status"], item["type"]) == ("response", "incomplete", "message")
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"]
    assert server.post(PATH, {**body, "input": CHAT}).json()["output"][0]["content"] == item["content"]
    part = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]
    assert server.post(PATH, {**body, "input": part}).json()["output"][0]["content"] == item["content"]


def test_a_stream_has_numbered_events_and_the_same_text(server):
    body = {"input": "Hello", "temperature": 0, "max_output_tokens": 6}
    events = server.events(PATH, body)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    names = [event["type"] for event in events]
    assert names[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert names[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert set(names[4:-4]) == {"response.output_text.delta"}
    text = "".join(event["delta"] for event in events[4:-4])
    assert text == events[-4]["text"] == server.post(PATH, body).json()["output"][0]["content"][0]["text"]


def test_a_response_is_sampled_as_a_chat_is(server):
    """Load generators send ignore_eos here, too."""
    options = {"seed": 7, "top_k": 5, "stop": ["q"], "logit_bias": LETTERS, "ignore_eos": True, "cache_salt": "a"}
    answer = server.post(PATH, {"input": "Hello", "max_output_tokens": 8, **options}).json()
    chat = server.chat(max_tokens=8, **options)
    assert answer["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    token = {"logit_bias": {"97": 100}, "stop_token_ids": [97], "temperature": 0}
    ended = server.post(PATH, {"input": "Hello", **token}).json()
    assert (ended["status"], ended["usage"]["output_tokens"]) == ("completed", 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("conversation", "conv_1"),
        ("store", True),
        ("background", True),
        ("tools", [{"type": "function", "name": "f"}]),
        ("reasoning", {"effort": "high"}),
        ("include", ["message.output_text.logprobs"]),
        ("truncation", "auto"),
        ("input", []),
        ("input", [{"type": "item_reference", "id": "x"}]),
        ("max_output_tokens", 0),
        ("logit_bias", {"100000": 1}),
        ("stream_options", {"include_obfuscation": False}),
    ],
)
def test_what_needs_a_memory_or_tools_is_refused_by_name(server, field, value):
    answer = server.post(PATH, {"input": "Hi", field: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(field)
