"""Chat templates: the same text as transformers renders, and limits for malicious templates."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from clearhead.errors import ClearheadError
from clearhead.tokenization.characters import byte_tokenizer
from clearhead.tokenization.chat_template import render_chat
from clearhead.tokenization.library_tokenizer import SpecialTokens
from clearhead.tokenization.template_limits import MAX_TEMPLATE_CHARACTERS, MAX_VALUE_CHARACTERS

TEMPLATES = {
    "as ChatML": """
{%- for message in messages %}
    {%- if loop.first and messages[0]['role'] != 'system' %}
        {{- '<|im_start|>system\\nYou are of help.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
""",
    "as Llama 2": """{% if messages[0].role == 'system' %}
{% set system = '<<SYS>>\\n' ~ messages[0].content ~ '\\n<</SYS>>\\n\\n' %}
{% set turns = messages[1:] %}
{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}
{% for message in turns %}
  {% if (message.role == 'user') != (loop.index0 % 2 == 0) %}
    {{ raise_exception('roles must alternate between user and assistant') }}
  {% endif %}
  {% if message.role == 'user' %}
{{ bos_token + '[INST] ' + (system if loop.first else '') + message.content | trim + ' [/INST]' }}
  {% else %}
{{ ' ' + message.content.strip() + ' ' + eos_token }}
  {% endif %}
{% endfor %}""",
    "with tools and thoughts": """
{%- macro block(role, text) -%}{{ '<|im_start|>' ~ role ~ '\\n' ~ text ~ '<|im_end|>\\n' }}{%- endmacro -%}
{%- if tools %}
    {%- set listed = namespace(text='') %}
    {%- for tool in tools %}{% set listed.text = listed.text + '\\n' + (tool | tojson) %}{% endfor %}
    {{- block('system', '# Tools' + listed.text) }}
{%- endif %}
{%- set state = namespace(last=messages | length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- if not state.found and message.role == 'user' and not message.content.startswith('<tool') %}
        {%- set state.found = true %}{% set state.last = messages | length - loop.index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
        {%- if message.tool_calls is defined and message.tool_calls %}
            {%- for call in message.tool_calls %}
                {%- set content = content ~ '\\n<tool_call>' ~ (call.function | default(call) | tojson(indent=2)) %}
            {%- endfor %}
        {%- endif %}
        {%- generation %}{{ block('assistant', content) }}{% endgeneration %}
    {%- elif message.role == 'system' and not loop.first %}{% continue %}
    {%- else %}{{ block(message.role | title, message.content | replace('\\t', '  ')) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}
{%- endif %}""",
    "with many filters": """{{ messages | map(attribute='role') | unique | join(', ') | upper }}
{{ (messages | selectattr('role', 'equalto', 'user') | list | last).content | indent(2, true) }}
{{ messages | rejectattr('role', 'equalto', 'user') | map(attribute='content') | list | tojson }}
{% for key, value in dict(b=1, a=[2, 3]) | dictsort %}{{ key }}={{ value }};{% endfor %}
{% for key, value in {'x': {'y': None}}.items() %}{{ key }}:{{ value | tojson }}{% endfor %}
{{ '%s' }}{{ 7 // 2 }}{{ 2 ** 10 }}{{ 'ab' * 3 }}{{ [1] + [2] }}{{ 'a' in 'abc' }}{{ ' - '.join(['p', 'q']) }}
{{ 'a.b.c'.replace('.', '/') }}{{ (1, 2)[0] }}{{ range(3) | list }}{{ none is none }}{{ nothing | default('d') }}
{% set text %}{% for i in range(10) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}{% endset %}{{ text }}
{{ '{} {1} {x}{{}}'.replace('1', '').format('a', none, x=[1]) }}{{ '{1}{0}'.format('a', 2) }}
{% filter upper %}{{ messages[0].content }}{% endfilter %}{{ strftime_now('%%') }}{{ loop_missing }}""",
}
MESSAGES = [
    {"role": "system", "content": "Be <kind> & 'brief'.\tAlways."},
    {"role": "user", "content": " Hello,\n naïve 世界 👍 "},
    {
        "role": "assistant",
        "content": "<think>\nhm\n</think>\n\nHi!",
        "tool_calls": [{"function": {"name": "look", "arguments": {"place": "Besançon", "days": [1, 2.5, None]}}}],
    },
    {"role": "user", "content": "And now?"},
]
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Sees «all» <things>.", "parameters": {}}}]


def tokenizer_with(template):
    tokenizer = byte_tokenizer(SpecialTokens(bos="<s>", eos="</s>"))
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer_with("").save(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    "options",
    [
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": True, "tools": TOOLS, "variables": {"enable_thinking": False}},
    ],
    ids=["prompt", "no prompt", "tools"],
)
def test_chats_equal_those_of_transformers(name, first, options, theirs):
    messages = MESSAGES[first:]
    ours = render_chat(tokenizer_with(TEMPLATES[name]), messages, **options)
    their_options = {key: value for key, value in options.items() if key != "variables"} | options.get("variables", {})
    expected = theirs.apply_chat_template(messages, chat_template=TEMPLATES[name], tokenize=False, **their_options)
    assert ours == expected
    assert ours


def test_an_exception_raised_by_the_template_is_passed_on():
    with pytest.raises(ClearheadError, match="failed: roles must alternate between user and assistant"):
        render_chat(tokenizer_with(TEMPLATES["as Llama 2"]), MESSAGES[2:])


def test_a_chat_needs_a_template_and_messages():
    with pytest.raises(ClearheadError, match="no chat template"):
        render_chat(byte_tokenizer(), MESSAGES)
    with pytest.raises(ClearheadError, match="at least one"):
        render_chat(tokenizer_with("x"), [])


def failure(template, limit_seconds=60.0, **variables):
    """Return the message of the error that a template raises, and the processor seconds it took.

    The limit is for templates that end; it is high because a collection of garbage in between counts as their time.
    """
    start_seconds = time.process_time()
    with pytest.raises(ClearheadError) as raised:
        render_chat(tokenizer_with(template), MESSAGES, variables=variables, limit_seconds=limit_seconds)
    assert "\n" not in str(raised.value)
    return str(raised.value), time.process_time() - start_seconds


LOOP = "{% for i in range(99999) %}"
END = "{% endfor %}"
ENDLESS = [
    LOOP * 3 + END * 3,
    "{% set x = range(99999) | list %}{% for a in x %}{% for b in x %}{% endfor %}{% endfor %}",
    LOOP * 2 + "{{ i }}" + END * 2,
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for a in [1] recursive %}" + LOOP + "{{ loop.index }}" + END + "{{ loop([1, 1]) }}{% endfor %}",
    LOOP * 2 + "{{ messages | map('tojson') | join }}" + END * 2,
]


@pytest.mark.parametrize("template", ENDLESS)
def test_endless_templates_are_stopped(template):
    message, seconds = failure(template, limit_seconds=0.3)
    assert any(reason in message for reason in ("longer than 0.3 seconds", "MiB in total", "recursion"))
    assert seconds < 10  # without limits none of them would end


HUGE = "more than 8388608 characters"
TOTAL = "more than 256 MiB in total"
DOUBLING = "{% set ns = namespace(x=START) %}{% for i in range(99) %}{% set ns.x = NEXT %}{% endfor %}{{ ns.x }}"


def doubling(start, following):
    return DOUBLING.replace("START", start).replace("NEXT", following)


OVERSIZED = {
    "{{ 'a' * 10 ** 9 }}": HUGE,
    "{{ 10 ** 9 * 'a' }}": HUGE,
    "{{ [1] * 10 ** 9 }}": HUGE,
    "{{ (1, 2) * 10 ** 9 }}": HUGE,
    "{{ 10 ** (10 ** 8) }}": "more than 4096 bits",
    "{{ ('f' * 5000) | int(0, 16) }}": "more than 4096 bits",
    doubling("3", "ns.x * ns.x"): "more than 4096 bits",
    doubling("'aa'", "ns.x ~ ns.x"): HUGE,
    doubling("'aa'", "ns.x + ns.x"): HUGE,
    doubling("'aa'", "[ns.x, ns.x] | join"): HUGE,
    doubling("'aa'", "ns.x.replace('a', 'aa')"): HUGE,
    doubling("[1]", "[ns.x, ns.x]"): HUGE,
    doubling("[1]", "(ns.x, ns.x)"): HUGE,
    doubling("[1]", "{1: ns.x, 2: ns.x}"): HUGE,
    doubling("[1]", "dict(a=ns.x, b=ns.x)"): HUGE,
    doubling("[1]", "ns.x + ns.x"): HUGE,
    "{{ ('a' * 10 ** 6) | replace('', 'b' * 10 ** 6) }}": HUGE,
    "{{ ('a' * 10 ** 6).replace('a', 'b' * 10 ** 6) }}": HUGE,
    "{{ ('b' * 10 ** 6).join('a' * 10 ** 5) }}": HUGE,
    "{{ range(99999) | join('b' * 10 ** 6) }}": HUGE,
    "{{ 'a\nb' | indent(10 ** 9) }}": HUGE,
    "{{ messages | tojson(indent=10 ** 9) }}": "indents JSON by more than 16",
    "{% set x %}" + LOOP + "{{ 'y' * 100000 }}" + END + "{% endset %}": TOTAL,
    "{% set x %}" + LOOP + "y" * 50_000 + END + "{% endset %}": TOTAL,
    LOOP + "{{ messages }}" * 50 + END: TOTAL,
    "".join(f"{{% set x{i} = 'y' * 8000000 %}}" for i in range(99)): TOTAL,
    "{% set x = 'y' * 8000000 %}" + "".join(f"{{% set x{i} = x[1:] %}}" for i in range(99)): TOTAL,
    "{% for i in range(10 ** 9) %}{% endfor %}": "Range too big",
    "x" * (MAX_TEMPLATE_CHARACTERS + 1): "131073 characters",
}


@pytest.mark.parametrize(("template", "expected"), OVERSIZED.items(), ids=range(len(OVERSIZED)))
def test_templates_that_create_too_much_are_stopped(template, expected):
    message, seconds = failure(template)
    assert expected in message
    assert seconds < 10  # without limits none of them would end


FORBIDDEN = [
    "{{ messages.__class__.__mro__ }}",
    "{{ messages['__class__']['__base__'] }}",
    "{{ ''.__class__.__base__.__subclasses__() }}",
    "{{ range.__globals__.os }}",
    "{{ raise_exception.__globals__['json'] }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.environment }}",
    "{{ messages | attr('__class__') }}",
    "{{ messages | map(attribute='__class__.__base__') | list }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ '{0[0]}'.format(messages) }}",
    "{{ '{0!r}'.format(messages) }}",
    "{{ '{:{}}'.format('a', 10 ** 9) }}",
    "{{ '{5}'.format('a') }}",
    "{{ ['{0.__class__}'.format][0](messages) }}",
    "{{ '%s' % messages }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ 'a'.ljust(10 ** 9) }}",
    "{{ 'a' | center(10 ** 9) }}",
    "{{ (5).to_bytes(10 ** 9, 'big') }}",
    "{{ 5 | round(-10 ** 9) }}",
    "{{ lipsum(10 ** 6) }}",
    "{% include 'file' %}",
    "{% import 'os' as os %}",
]


@pytest.mark.parametrize("template", FORBIDDEN)
def test_templates_cannot_reach_internals_or_unlimited_operations(template):
    failure(template)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% if %}", "Expected an expression"),
        ("{{ missing.name.more }}", "'missing' is undefined"),
        ("{% for x in 5 %}{% endfor %}", "not iterable"),
        ("{% break %}", "outside loop"),
        ("{{" + "(" * 5000 + ")" * 5000 + "}}", "recursion"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% for a in b %}" * 30 + "{% endfor %}" * 30, "nested blocks"),
        ("{{ 'x'[::0] }}", "slice step"),
        ("{{ " + "9" * 5000 + " }}", "4300 digits"),
        ("{{ strftime_now(5) }}", "must be str"),
        ("{{ raise_exception('line one\nline two') }}", "line one"),
        ("{{ raise_exception('') }}", "TemplateError"),
    ],
)
def test_other_failures_give_a_one_line_message(template, expected):
    assert expected in failure(template)[0]


def test_messages_that_are_too_large_are_rejected():
    messages = [{"role": "user", "content": "x" * (MAX_VALUE_CHARACTERS + 1)}]
    with pytest.raises(ClearheadError, match=HUGE):
        render_chat(tokenizer_with("{{ messages }}"), messages)


WORDS = ["{{", "}}", "{%", "%}", "for", "in", "if", "endfor", "endif", "set", "x", "=", "|", "join", "(", ")", "[", "]"]
WORDS += ["messages", "loop", ".", "role", "'a'", "1", "*", "+", "~", "-", "macro", "endmacro", ",", "range", " ", "\n"]


@given(st.lists(st.sampled_from(WORDS), max_size=25))
@settings(max_examples=300, deadline=None)
def test_any_template_gives_text_or_a_clearhead_error(words):
    template = " ".join(words)
    try:
        assert isinstance(render_chat(tokenizer_with(template), MESSAGES, limit_seconds=0.2), str)
    except ClearheadError:
        assert words


def test_waiting_for_a_busy_machine_does_not_count_as_time_of_a_template():
    messages = [{"role": "user", "content": _SlowText("Hello")}]
    assert render_chat(tokenizer_with("{{ messages[0].content }}"), messages, limit_seconds=0.5) == "Hello"


class _SlowText(str):
    """A text that waits, without computing, when a template prints it."""

    def __str__(self):
        time.sleep(0.6)
        return str.__str__(self)
