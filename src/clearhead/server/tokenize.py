"""/tokenize, /detokenize and /tokenizer_info: objects in, objects out. Without HTTP.

data = tokenize(service, body); data = detokenize(service, body); data = tokenizer_info(service)
"""

from typing import Any

from clearhead.errors import ClearheadError
from clearhead.server.api_errors import invalid
from clearhead.server.fields import read_fields, template_variables
from clearhead.server.json_text import parse_json
from clearhead.server.messages import plain_messages
from clearhead.server.prompts import encode_messages
from clearhead.server.schemas import detokenize_fields, tokenize_fields
from clearhead.server.service import Service


def tokenize(service: Service, body: bytes) -> dict[str, Any]:
    """Return the token ids of a text or of a conversation."""
    found = read_fields(parse_json(body), tokenize_fields(service.settings.limits))
    service.check_model(found.get("model"))
    if ("prompt" in found) == ("messages" in found):
        raise invalid("give either prompt, a text, or messages, a conversation", "prompt")
    if "messages" in found:
        if found.get("add_special_tokens"):
            message = "add_special_tokens is for prompt; the chat template adds special tokens to messages"
            raise invalid(message, "add_special_tokens")
        begins = found.get("add_generation_prompt", True)
        ids = encode_messages(service, plain_messages(found["messages"]), template_variables(found), begins)
    else:
        for name in ("add_generation_prompt", "chat_template_kwargs"):
            if name in found:
                raise invalid(f"{name} is for messages; leave it out", name)
        ids = _encode(service, found["prompt"], found.get("add_special_tokens", True))
    texts = [service.tokenizer.token_text(token) for token in ids] if found.get("return_token_strs") else None
    return {"count": len(ids), "max_model_len": service.max_length, "tokens": ids, "token_strs": texts}


def _encode(service: Service, text: str, add_special_tokens: bool) -> list[int]:
    try:
        return service.tokenizer.encode(text, add_special_tokens)
    except ClearheadError as error:
        raise invalid(str(error), "prompt") from None


def detokenize(service: Service, body: bytes) -> dict[str, Any]:
    """Return the text of token ids."""
    found = read_fields(parse_json(body), detokenize_fields(service.settings.limits))
    service.check_model(found.get("model"))
    size = max(service.tokenizer.vocab_size, service.model.config.vocab_size)
    wrong = next((token for token in found["tokens"] if token >= size), None)
    if wrong is not None:
        raise invalid(f"tokens contains {wrong}; the vocabulary has the ids 0 to {size - 1}", "tokens")
    return {"prompt": service.tokenizer.decode(found["tokens"], found.get("skip_special_tokens", False))}


def tokenizer_info(service: Service) -> dict[str, Any]:
    """Return the special tokens and the chat template, as lm-evaluation-harness asks for them."""
    tokenizer = service.tokenizer
    ids = {
        "bos_token": tokenizer.bos_id,
        "eos_token": tokenizer.eos_id,
        "pad_token": tokenizer.pad_id,
        "unk_token": tokenizer.unknown_id,
    }
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": tokenizer.vocab_size,
        "max_model_len": service.max_length,
        **{name: None if token is None else tokenizer.token_text(token) for name, token in ids.items()},
        **{f"{name}_id": token for name, token in ids.items()},
        "stop_token_ids": sorted(service.model.text_generator.stop_ids) if service.generates else [],
        "chat_template": tokenizer.chat_template,
    }
