"""tools: calls in the common formats, parsed whole and from any pieces; tool_choice; refusals (A25)."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.server.tool_readers import ToolCall
from clearhead.server.tool_syntax import Hermes, Llama, Mistral, NamedMistral, find_syntax
from tests.server.toys import CHAT, TEMPLATE, serve, toy_model

PATH = "/v1/chat/completions"
NAMES = ("get_weather", "now")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"enum": [1, 2, 3]}},
                "required": ["city", "days"],
                "additionalProperties": False,
                "$defs": {"city": {"enum": ["Paris", "Rome"]}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
FORMATS = {
    "hermes": "<tool_call>",
    "mistral": "[TOOL_CALLS]",
    "mistral by name": "[TOOL_CALLS][ARGS]",
    "llama": '<|python_tag|>{"name": x, "parameters": y}',
}
SHOWN = "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{{ 'MARKER' }}\n{% endif %}"
CALLED = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}({{ c.function.arguments.city }}){% endfor %}{% endfor %}"
)

PARIS = ToolCall("get_weather", '{"city": "Paris"}', "")
NOW = ToolCall("now", "{}", "")
# As Qwen2.5, Hermes 2 Pro, Mistral 7B v0.3, Mistral Small 3.2 and Llama 3.1 write them.
WRITTEN = [
    (Hermes(), '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', [PARIS]),
    (
        Hermes(),
        'I look.\n\n<tool_call>\n{"arguments": {"city": "Paris"}, "name": "get_weather"}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n',
        ["I look.", PARIS, NOW],
    ),
    (Hermes(), '<tool_call>{"name": "now", "arguments": {}}', [NOW]),  # ended before the tag
    (
        Hermes(),
        '<tool_call>{"name": "now", "arguments": {"a": "</tool_call>"}}</tool_call>',
        [ToolCall("now", '{"a": "</tool_call>"}', "")],
    ),
    (Mistral(), '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]', [PARIS]),
    (Mistral(), '[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]', [NOW, NOW]),
    (NamedMistral(), '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[ARGS]{}', [PARIS, NOW]),
    (NamedMistral(), "Yes.[TOOL_CALLS]now{}", ["Yes.", NOW]),
    (Llama(), '{"name": "get_weather", "parameters": {"city": "Paris"}}', [PARIS]),
    (Llama(), '<|python_tag|>{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}', [NOW, NOW]),
]
PLAIN = [
    (Hermes(), "Use <tool_call> to call."),
    (Hermes(), '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'),  # not offered
    (Hermes(), "<tool_call>nonsense</tool_call> and more"),
    (Hermes(), '<tool_call>{"name": "now", "arguments": [1]}</tool_call>'),
    (Hermes(), '<tool_call>{"name": "get_weather", "arguments": {"city": "Pa'),  # cut off
    (Mistral(), "[TOOL_CALLS] nothing"),
    (Mistral(), "Hello [TOOL_"),
    (Llama(), '{"city": "Paris"}'),
    (Llama(), '{"name": "now", "parameters": {}} and more'),
    (Llama(), 'Well: {"name": "now", "parameters": {}}'),
]


def read(syntax, pieces, at_most_one=False):
    reader = syntax.reader(NAMES, at_most_one)
    parts = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
    joined = []
    for part in parts:
        if isinstance(part, ToolCall):
            joined.append(ToolCall(part.name, part.arguments, ""))
        elif joined and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    return joined


@pytest.mark.parametrize(("syntax", "text", "expected"), WRITTEN, ids=lambda value: str(value)[:30])
def test_calls_are_found_whole_and_letter_by_letter(syntax, text, expected):
    assert read(syntax, [text]) == expected
    assert read(syntax, text) == expected
    calls = [part for part in expected if isinstance(part, ToolCall)]
    assert [part for part in read(syntax, text, at_most_one=True) if isinstance(part, ToolCall)] == calls[:1]


@pytest.mark.parametrize(("syntax", "text"), PLAIN, ids=lambda value: str(value)[:30])
def test_what_is_no_call_stays_text(syntax, text):
    assert read(syntax, [text]) == [text]
    assert read(syntax, text) == [text]


SYNTAXES = st.sampled_from([Hermes(), Mistral(), NamedMistral(), Llama()])
FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<tool", "[TOOL_CALLS]", "[ARGS]", "now", "{}", " ", "\n", "a", "<|python_tag|>"),
    *('{"name": "now", "arguments": {}}', '{"name": "now", "parameters": {}}', '{"name": "n', '"', "}", ";", "["),
]


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([Hermes(), Mistral(), NamedMistral(), Llama()]), st.lists(st.sampled_from(FRAGMENTS), max_size=9)
)
def test_any_pieces_give_the_parts_of_the_whole(syntax, fragments):
    whole = read(syntax, ["".join(fragments)])
    assert read(syntax, fragments) == whole
    assert read(syntax, "".join(fragments)) == whole
    assert all(isinstance(json.loads(part.arguments), dict) for part in whole if isinstance(part, ToolCall))


def test_the_format_is_that_of_the_template():
    kinds = {name: type(find_syntax(SHOWN.replace("MARKER", marker))) for name, marker in FORMATS.items()}
    assert kinds == {"hermes": Hermes, "mistral": Mistral, "mistral by name": NamedMistral, "llama": Llama}
    assert find_syntax(TEMPLATE) is None
    assert find_syntax("{{ tools }}") is None


# --- over HTTP; a random model calls because a grammar leaves it no choice


def tool_server(name):
    model = toy_model(context=2048)
    model.tokenizer.chat_template = SHOWN.replace("MARKER", FORMATS[name]) + CALLED + TEMPLATE
    return serve(model)


@pytest.fixture(scope="module")
def hermes():
    with tool_server("hermes") as running:
        yield running
        running.wait_until_idle()


def ask(server, **fields):
    return server.post(PATH, {"messages": CHAT, "tools": TOOLS, "max_tokens": 400, **fields})


def check_calls(message):
    assert message["role"] == "assistant"
    for call in message["tool_calls"]:
        assert call["type"] == "function"
        arguments = json.loads(call["function"]["arguments"])
        if call["function"]["name"] == "get_weather":
            assert arguments["city"] in ("Paris", "Rome")
            assert arguments["days"] in (1, 2, 3)
        else:
            assert (call["function"]["name"], arguments) == ("now", {})
    assert len({call["id"] for call in message["tool_calls"]}) == len(message["tool_calls"])


@pytest.mark.parametrize("name", FORMATS)
def test_a_required_call_follows_its_schema_in_every_format(name):
    pytest.importorskip("llguidance", reason="the extra grammar is not installed")
    with tool_server(name) as server:
        for seed in range(3):
            choice = ask(server, tool_choice="required", parallel_tool_calls=False, seed=seed).json()["choices"][0]
            assert choice["finish_reason"] == "tool_calls"
            assert choice["message"]["content"] is None
            assert len(choice["message"]["tool_calls"]) == 1
            check_calls(choice["message"])


def test_a_named_function_is_called_and_streamed_as_deltas(hermes):
    pytest.importorskip("llguidance", reason="the extra grammar is not installed")
    fields = {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}, "seed": 4, "n": 2}
    choices = ask(hermes, **fields).json()["choices"]
    body = {"messages": CHAT, "tools": TOOLS, "max_tokens": 400, **fields}
    events = hermes.events(PATH, body)
    for index, whole in enumerate(choices):
        check_calls(whole["message"])
        chunks = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert chunks[0]["delta"] == {"role": "assistant", "content": ""}
        assert (chunks[-1]["delta"], chunks[-1]["finish_reason"]) == ({}, "tool_calls")
        parts = [part for chunk in chunks for part in chunk["delta"].get("tool_calls", [])]
        assert {part["index"] for part in parts} == {0}
        assert [part.get("id") is not None for part in parts] == [True] + [False] * (len(parts) - 1)
        assert parts[0]["function"]["name"] == "get_weather"
        arguments = "".join(part["function"]["arguments"] for part in parts)
        assert json.loads(arguments) == json.loads(whole["message"]["tool_calls"][0]["function"]["arguments"])


def test_tools_reach_the_template_unless_the_choice_is_none(hermes):
    plain = hermes.chat(logit_bias={})["usage"]["prompt_tokens"]
    shown = sum(len(json.dumps(tool)) + 1 for tool in TOOLS)
    assert ask(hermes, max_tokens=1).json()["usage"]["prompt_tokens"] >= plain + shown
    assert ask(hermes, max_tokens=1, tool_choice="none").json()["usage"]["prompt_tokens"] == plain


def test_calls_and_results_of_earlier_turns_reach_the_template(hermes):
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    history = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [call], "annotations": None},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    ids = hermes.post("/tokenize", {"messages": history}).json()["tokens"]
    text = hermes.post("/detokenize", {"tokens": ids}).json()["prompt"]
    assert "(Rome)" in text
    assert "[tool]sunny" in text
    assert ask(hermes, messages=history, max_tokens=1).status_code == 200


WRONG = [
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": TOOLS + TOOLS[:1]}, "tools[2].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "tools"),
    ({"tools": None, "tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "always"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": []}, {"role": "assistant"}]}, "messages[1].content"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "x"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    (
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}],
            "tool_choice": "required",
        },
        "tool_choice",
    ),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=str)
def test_wrong_tools_are_refused_by_name(hermes, fields, param):
    answer = ask(hermes, **fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(param)


def test_a_template_without_tools_refuses_them_by_name(server):
    answer = ask(server)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")
    assert ask(server, tool_choice="none", max_tokens=1).status_code == 200


def test_openai_reads_streamed_calls(hermes):
    pytest.importorskip("llguidance", reason="the extra grammar is not installed")
    import openai

    with openai.OpenAI(
        base_url=f"{hermes.url}/v1", api_key="x", max_retries=0, _strict_response_validation=True
    ) as client:
        options = {"model": "toy", "messages": CHAT, "tools": TOOLS, "tool_choice": "required", "seed": 2}
        whole = client.chat.completions.create(**options, parallel_tool_calls=False, max_tokens=400)
        with client.chat.completions.stream(**options, parallel_tool_calls=False, max_tokens=400) as stream:
            final = stream.get_final_completion()
    first, second = (answer.choices[0].message.tool_calls[0].function for answer in (whole, final))
    assert (first.name, json.loads(first.arguments)) == (second.name, json.loads(second.arguments))
