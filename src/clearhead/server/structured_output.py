"""response_format: texts that are JSON, or that follow a JSON schema, by a grammar that rules tokens out.

    token_filter = Grammars(model).json_filter({"type": "object"})

The library llguidance (the extra `grammar`) compiles a schema, within limits of its own, and computes which tokens may
come next. Compiling takes up to a second, so it is done in a thread, before the engine sees the request.
"""

import json
from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any

import numpy as np

from clearhead.api import Model
from clearhead.errors import shorten
from clearhead.server.api_errors import ApiError, invalid
from clearhead.tokenization import Tokenizer

_PARAM = "response_format"
_WHITESPACE = r"[ \n\r\t]{0,20}"  # a model may not write spaces without end
_MAX_MESSAGE_CHARACTERS = 300


class Grammars:
    """Compiles schemas for one model. Its methods may be called in any thread."""

    def __init__(self, model: Model):
        self._model = model
        self._lock = Lock()
        self._vocabulary: Any = None  # llguidance's view of the tokenizer, made when it is first needed

    def json_filter(self, schema: Mapping[str, Any] | bool) -> "GrammarFilter":
        """Return a filter for texts that follow a schema; True means any JSON object.

        Raise ApiError for a schema that is wrong or that the library does not support.
        """
        wanted = json.dumps({"type": "object"} if isinstance(schema, bool) else dict(schema))
        overrides = {"whitespace_flexible": True, "whitespace_pattern": _WHITESPACE}
        return self._filter(lambda matcher: matcher.grammar_from_json_schema(wanted, overrides=overrides), _PARAM)

    def lark_filter(self, grammar: str, param: str) -> "GrammarFilter":
        """Return a filter for texts of a grammar in the form of Lark. Raise ApiError, which names `param`, as above."""
        return self._filter(lambda matcher: matcher.grammar_from_lark(grammar), param)

    def _filter(self, compile_grammar: Callable[[Any], str], param: str) -> "GrammarFilter":
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise _unsupported("the server runs without the grammar library, clearhead[grammar]", param) from None
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = _create_vocabulary(self._model, param)
        try:
            grammar = compile_grammar(LLMatcher)
            error = LLMatcher.validate_grammar(grammar, self._vocabulary)
        except (ValueError, RecursionError) as failure:
            error = str(failure)
        if error and not error.startswith("WARNING"):
            reason = shorten(error.splitlines()[0], _MAX_MESSAGE_CHARACTERS)
            raise invalid(f"the JSON schema cannot be used: {reason}", param, "invalid_json_schema")
        return GrammarFilter(LLMatcher(self._vocabulary, grammar, log_level=0), self._model.config.vocab_size)


class GrammarFilter:
    """A TokenFilter: the state of a grammar within one text."""

    def __init__(self, matcher: Any, vocab_size: int):
        self._matcher, self._num_words = matcher, -(-vocab_size // 32)

    def allowed_tokens(self) -> np.ndarray:
        """Return the bits of the tokens that may come next, as int32."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)
        self._check()
        return bits[: self._num_words].copy()

    def accept(self, token: int) -> None:
        """Move on to the state after `token`."""
        self._matcher.consume_token(token)
        self._check()

    def fork(self) -> "GrammarFilter":
        """Return an independent filter in the same state."""
        return GrammarFilter(self._matcher.deep_copy(), self._num_words * 32)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RuntimeError(self._matcher.get_error())


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end: int):
        self.eos_token_id, self.bos_token_id = end, tokenizer.bos_id
        self.special_token_ids = sorted(tokenizer.special_ids)
        ordinary = next(token for token in range(tokenizer.vocab_size) if token not in tokenizer.special_ids)
        known = range(min(tokenizer.vocab_size, vocab_size))
        self.tokens = [
            tokenizer.token_text(token).encode()
            if token in tokenizer.special_ids
            else tokenizer.token_bytes(token, previous_id=ordinary)
            for token in known
        ]
        self.tokens += [b""] * (vocab_size - len(self.tokens))
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        """Return the token ids of a text."""
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._tokenizer.encode(text, add_special_tokens=False)


def _create_vocabulary(model: Model, param: str) -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper

    ends = sorted(model.text_generator.stop_ids)
    if model.tokenizer is None or not ends:
        raise _unsupported("the model has no tokenizer or no token that ends a text", param)
    vocab_size = model.config.vocab_size
    wrapper = TokenizerWrapper(_Vocabulary(model.tokenizer, vocab_size, ends[0]))
    return LLTokenizer(wrapper, n_vocab=vocab_size, eos_token=ends)


def _unsupported(reason: str, param: str) -> ApiError:
    instead = 'set it to {"type": "text"}' if param == _PARAM else "set it to auto or none"
    message = f"{param} is not supported, because {reason}; leave it out or {instead}"
    return invalid(message, param, "unsupported_parameter")
