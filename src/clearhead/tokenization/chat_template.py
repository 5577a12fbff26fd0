"""Render messages to the prompt format of a model, with the chat template from its files.

    prompt = render_chat(tokenizer, [{"role": "user", "content": "Hello!"}])
    ids = tokenizer.encode(prompt, add_special_tokens=False)   # the template has added the special tokens

Generation then ends at `tokenizer.stop_ids`. A template is an untrusted program, so it runs in `template_sandbox`
within limits of time and size.
"""

from collections.abc import Mapping, Sequence

from jinja2 import TemplateError

from clearhead.errors import ClearheadError
from clearhead.tokenization.interface import Tokenizer
from clearhead.tokenization.template_sandbox import TemplateSandbox

# What a template can raise: Jinja's own errors, and those of Python's operators, methods and compiler.
_TEMPLATE_FAILURES = (
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
    """Return the prompt for `messages`; `add_generation_prompt` appends the start of the assistant's answer.

    `variables` are further variables of the template, such as `enable_thinking`. Raise ClearheadError if the tokenizer
    has no template, or if the template fails or computes for more than `limit_seconds`.
    """
    if tokenizer.chat_template is None:
        raise ClearheadError("the tokenizer has no chat template; give the prompt as plain text instead")
    if not messages:
        raise ClearheadError("there are no messages; a chat needs at least one")
    all_variables = {
        **_special_tokens(tokenizer),
        "messages": messages,
        "tools": tools,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
        **(variables or {}),
    }
    try:
        return TemplateSandbox(limit_seconds).render(tokenizer.chat_template, all_variables)
    except _TEMPLATE_FAILURES as error:
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
    """Return the first line of an error's message, or the name of its class."""
    message = getattr(error, "message", None) or str(error) or type(error).__name__
    return str(message).splitlines()[0][:300]
