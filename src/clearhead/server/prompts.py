"""From prompts and messages to requests for the engine. Run these functions in a thread: they may take long.

ids = encode_text(service, "Hello", add_special_tokens=True); requests = plan_texts(service, ids, asked, salt=b"")
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from clearhead.architecture import check_tokens
from clearhead.engine import Request, TokenFilter
from clearhead.errors import ClearheadError
from clearhead.server.api_errors import ApiError, invalid
from clearhead.server.fields import GenerationFields
from clearhead.server.service import Service
from clearhead.tokenization import render_chat


def encode_text(
    service: Service, prompt: str | list[int], add_special_tokens: bool, param: str = "prompt"
) -> list[int]:
    """Return the token ids of a prompt; those of a client are checked. Raise ApiError for an empty or wrong prompt."""
    try:
        ids = service.tokenizer.encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt
        config = service.model.config
        stack = config.encoder or config.output_stack
        if len(ids) <= service.max_length:  # a longer one is refused with the sizes
            check_tokens(ids, stack)
    except ClearheadError as error:
        raise invalid(str(error), param) from None
    return ids


def encode_messages(
    service: Service,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    """Return the token ids of a conversation in the chat template."""
    if not service.model.has_chat_template:
        message = "this model has no chat template; use /v1/completions to continue a text"
        raise invalid(message, "messages", "no_chat_template")
    try:
        text = render_chat(
            service.tokenizer, messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables
        )
        return service.tokenizer.encode(text, add_special_tokens=False)
    except ClearheadError as error:
        raise invalid(str(error), "messages") from None


def plan_texts(
    service: Service,
    ids: list[int],
    asked: GenerationFields,
    salt: bytes,
    *,
    scores_prompt: bool = False,
    token_filter: TokenFilter | None = None,
) -> list[Request]:
    """Return the engine's requests for the n texts of one prompt. Raise ApiError if the context has no room."""
    if not service.generates:
        raise invalid("this model has only an encoder, so it cannot generate texts; use /v1/embeddings", "model")
    options = {
        **asked.options,
        "max_new_tokens": _num_new_tokens(service, len(ids), asked.max_tokens),
        "stop_ids": asked.stop_ids,
        "logprobs": asked.logprobs,
    }
    try:
        sequences = service.model.text_generator.create_sequences(ids, asked.n, options)
    except ClearheadError as error:
        raise invalid(str(error)) from None
    filters: list[TokenFilter | None] = [None if token_filter is None else token_filter.fork() for _ in sequences]
    return [
        Request(
            prompt=each.prompt,
            source=each.source,
            options=replace(each.options, stop_ids=asked.stop_ids) if asked.ignore_eos else each.options,
            salt=_salt(salt, asked.cache_salt),
            prompt_logprobs=asked.logprobs or 0 if scores_prompt else None,
            token_filter=own_filter,
        )
        for each, own_filter in zip(sequences, filters, strict=True)
    ]


def _num_new_tokens(service: Service, num_prompt_tokens: int, max_tokens: int | None) -> int:
    """Return how many tokens may be generated: those asked for, or what the context has room for."""
    context = service.max_length
    num_read = 1 if service.model.config.is_encoder_decoder else num_prompt_tokens  # tokens that the decoder reads
    least = 1 if max_tokens is None else max_tokens
    if num_prompt_tokens > context or num_read + least > context:
        asked = "" if max_tokens is None else f" and max_tokens is {max_tokens}"
        message = (
            f"this model's context has room for {context} tokens, but the prompt has {num_prompt_tokens}{asked}; "
            "use a shorter prompt or ask for fewer tokens"
        )
        raise context_error(message)
    return min(context - num_read, service.settings.limits.max_new_tokens) if max_tokens is None else max_tokens


def context_error(message: str) -> ApiError:
    """Return the error for a prompt that is too long."""
    return invalid(message, "max_tokens" if "max_tokens" in message else "prompt", "context_length_exceeded")


def _salt(key: bytes, cache_salt: str) -> bytes:
    """Return the salt of cached prefixes: clients with different keys, or different salts, share none."""
    if not key and not cache_salt:
        return b""
    return hashlib.sha256(key + b"\0" + cache_salt.encode()).digest()
