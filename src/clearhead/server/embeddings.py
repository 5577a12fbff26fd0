"""/v1/embeddings: objects in, objects out. Without HTTP.

asked = plan_embeddings(service, body); vector = embed(service, asked.texts[0], None); data = embedding_answer(...)
"""

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np

from clearhead.errors import ClearheadError
from clearhead.server.api_errors import failed, invalid
from clearhead.server.fields import read_fields, split_prompts
from clearhead.server.json_text import parse_json
from clearhead.server.prompts import context_error, encode_text
from clearhead.server.schemas import embedding_fields
from clearhead.server.service import Service


@dataclass(frozen=True)
class EmbeddingRequest:
    """Texts to embed. A text may be token ids; the model may put a prompt of its own before one of characters."""

    texts: list[str | list[int]]
    num_tokens: int
    as_base64: bool
    dimensions: int | None  # the number that the client expects


def plan_embeddings(service: Service, body: bytes) -> EmbeddingRequest:
    """Return what a request asks for."""
    found = read_fields(parse_json(body), embedding_fields(service.settings.limits))
    service.check_model(found.get("model"))
    texts = split_prompts(found["input"])
    lengths = [len(encode_text(service, text, True, "input")) for text in texts]
    longest = max(lengths)
    if longest > service.max_length:
        message = f"this model reads at most {service.max_length} tokens, but a text has {longest}; use shorter texts"
        raise context_error(message)
    return EmbeddingRequest(texts, sum(lengths), found.get("encoding_format") == "base64", found.get("dimensions"))


def embed(service: Service, text: str | list[int], dimensions: int | None) -> np.ndarray:
    """Return the vector of one text. Texts are embedded one by one, so that none depends on its neighbors.

    Raise ApiError if the client expects another number of dimensions.
    """
    try:
        vector: np.ndarray = service.model.embed([text])[0].float().cpu().numpy()
    except ClearheadError as error:
        raise invalid(str(error), "input") from None
    if dimensions not in (None, len(vector)):
        raise invalid(f"dimensions is {dimensions}; vectors of this model have {len(vector)} numbers", "dimensions")
    if not np.isfinite(vector).all():
        raise failed("the vector of this text is not finite; the model's dtype may be too narrow")
    return vector


def embedding_answer(service: Service, asked: EmbeddingRequest, vectors: list[np.ndarray]) -> dict[str, Any]:
    """Return the list of vectors, in the order of the texts."""
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _encode(vector, asked.as_base64)}
            for index, vector in enumerate(vectors)
        ],
        "model": service.name,
        "usage": {"prompt_tokens": asked.num_tokens, "total_tokens": asked.num_tokens},
    }


def _encode(vector: np.ndarray, as_base64: bool) -> str | list[float]:
    if as_base64:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
    return vector.tolist()
