"""What the page knows about a model: its kind, its sizes and what it can do.

model_data(model)["num_layers"]
"""

from typing import Any

from clearhead.api import Model


def model_data(model: Model) -> dict[str, Any]:
    """Return the description of a model as JSON data."""
    config, stack = model.config, model.config.output_stack
    first = stack.layers[0].attention
    kind = "encoder-decoder" if config.is_encoder_decoder else "encoder" if config.decoder is None else "decoder"
    return {
        "description": repr(model),
        "kind": kind,
        "chats": model.has_chat_template,
        "has_text": model.tokenizer is not None,
        "has_logits": config.head is not None,
        "num_layers": len(stack.layers),
        "num_heads": [layer.attention.num_heads for layer in stack.layers],
        "num_key_value_heads": getattr(first, "num_kv_heads", None),
        "head_width": getattr(first, "head_width", None),
        "width": config.width,
        "vocab_size": config.vocab_size,
        "context": config.context,
        "start_id": model.text_generator.start_id if config.is_encoder_decoder else None,
    }
