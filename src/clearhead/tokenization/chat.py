"""Messages to the prompt that a model was trained on, by the chat template in its files.

    prompt = render_chat(tokenizer, [{"role": "user", "content": "Hello!"}])
    ids = tokenizer.encode(prompt, add_special_tokens=False)   # the template wrote the special tokens

Generation then ends at `tokenizer.stop_ids`. A template is a program from somebody's file: it runs in
`chat_sandbox`, with limits.
"""

from collections.abc import Mapping, Sequence

from jinja2 import TemplateError

from clearhead.errors import ClearheadError
from clearhead.tokenization.base import Tokenizer
from clearhead.tokenization.chat_sandbox import LimitedSandbox

# What a template's steps can raise: Jinja's own errors, and those of Python's operators, methods and compiler.
TEMPLATE_FAILURES = (
    TemplateError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    NameError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, object]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, object]] | None = None,
    variables: Mapping[str, object] | None = None,
    limit_seconds: float = 2.0,
) -> str:
    """The prompt for `messages`, ready for the assistant's answer if `add_generation_prompt`.

    `variables` are what a template may ask for besides, such as `enable_thinking`.
    """
    if tokenizer.chat_template is None:
        raise ClearheadError("the tokenizer has no chat template; give the prompt as plain text instead")
    if not messages:
        raise ClearheadError("there are no messages; a chat has at least one")
    given = {
        **_special_tokens(tokenizer),
        "messages": messages,
        "tools": tools,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
        **(variables or {}),
    }
    try:
        return LimitedSandbox(limit_seconds).fill(tokenizer.chat_template, given)
    except TEMPLATE_FAILURES as error:
        raise ClearheadError(f"the chat template failed: {_reason(error)}") from error


def _special_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    ids = {
        "bos_token": tokenizer.bos_id,
        "eos_token": tokenizer.eos_id,
        "pad_token": tokenizer.pad_id,
        "unk_token": tokenizer.unknown_id,
    }
    return {name: tokenizer.token_text(token_id) for name, token_id in ids.items() if token_id is not None}


def _reason(error: Exception) -> str:
    """The first line of an error's own words, or its kind."""
    words = getattr(error, "message", None) or str(error) or type(error).__name__
    return str(words).splitlines()[0][:300]
