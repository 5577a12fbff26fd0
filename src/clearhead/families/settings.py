"""Typed access to the values of a foreign config.json, with a one-line error for a value that cannot be right.

settings = Settings(json_data, "config.json"); width = settings.integer("hidden_size")
"""

import sys
from collections.abc import Mapping
from typing import Any

from clearhead.architecture import Activation
from clearhead.config import MAX_LAYERS, MAX_SIZE
from clearhead.errors import ClearheadError, quote, unknown_name

# transformers' activation names; `gelu_fast` and `gelu_pytorch_tanh` differ from `gelu_new` in rounding only
_ACTIVATIONS_BY_NAME: dict[str, Activation] = {
    "relu": "relu",
    "relu2": "relu_squared",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "gelu_quick",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
    "xielu": "xielu",
}
NAMES_BY_ACTIVATION: dict[Activation, str] = {
    "relu": "relu",
    "relu_squared": "relu2",
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "gelu_quick": "quick_gelu",
    "silu": "silu",
    "tanh": "tanh",
    "xielu": "xielu",
}

_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
GENERATION_IDS = ("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens")
_ID_LISTS = ("eos_token_id", "forced_eos_token_id", "suppress_tokens")


class Settings:
    """The values of a JSON object, by name; a null counts as absent, as in transformers.

    Each method is named after the JSON type it returns. Without a default, an absent value raises ClearheadError.
    `where` names the file in error messages.
    """

    def __init__(self, data: Any, where: str):
        if not isinstance(data, Mapping):
            raise ClearheadError(f"{where} must hold a JSON object, not {type(data).__name__}")
        self.data, self.where = data, where

    def __contains__(self, name: str) -> bool:
        return self.data.get(name) is not None

    def _value(self, name: str, default: Any, types: type | tuple[type, ...], description: str) -> Any:
        value = self.data.get(name)
        if value is None:
            if default is None:
                raise ClearheadError(f"{self.where} has no {name!r}, which this model needs")
            return default
        if not isinstance(value, types) or (isinstance(value, bool) and types is not bool):
            raise ClearheadError(f"{self.where}: {name!r} must be {description}, not {quote(value)}")
        return value

    def integer(self, name: str, default: int | None = None, at_least: int = 0) -> int:
        """Return a whole number from `at_least` to MAX_SIZE, or to MAX_LAYERS if the name contains 'layer'."""
        value: int = self._value(name, default, int, "a whole number")
        largest = MAX_LAYERS if "layer" in name else MAX_SIZE
        if not at_least <= value <= largest:
            raise ClearheadError(f"{self.where}: {name!r} is {quote(value)}; it must be from {at_least} to {largest}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number as a float."""
        value = self._value(name, default, (int, float), "a number")
        if not abs(value) <= sys.float_info.max:
            raise ClearheadError(
                f"{self.where}: {name!r} is {quote(value)}; it must be finite and fit in a 64-bit float"
            )
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        """Return true or false."""
        return bool(self._value(name, default, bool, "true or false"))

    def truth(self, name: str, default: bool) -> bool:
        """Return a boolean as `boolean` does, but read null as false, as some classes of transformers do."""
        return False if self.data.get(name, default) is None else self.boolean(name, default)

    def string(self, name: str, default: str | None = None) -> str:
        """Return a string."""
        return str(self._value(name, default, str, "a string"))

    def array(self, name: str) -> list[Any]:
        """Return a list, which is empty if the setting is absent."""
        return list(self._value(name, (), (list, tuple), "a list"))

    def per_layer(self, name: str, num_layers: int) -> list[Any]:
        """Return a list with one entry for each layer, or an empty list if the setting is absent."""
        entries = self.array(name)
        if entries and len(entries) != num_layers:
            raise ClearheadError(f"{self.where}: {name!r} has {len(entries)} entries for {num_layers} layers")
        return entries

    def object(self, name: str) -> "Settings":
        """Return a nested object, which is empty if the setting is absent."""
        return Settings(self._value(name, {}, dict, "an object"), f"{self.where}: {name}")

    def token_ids(self, name: str) -> int | list[int] | None:
        """Return a token id, or for some names a list of them; None if absent, null or -1."""
        value, may_be_list = self.data.get(name), name in _ID_LISTS
        candidates = value if isinstance(value, list) and may_be_list else [value]
        ids = [token_id for token_id in candidates if token_id not in (None, -1)]
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id <= MAX_SIZE:
                description = "a token id or a list of them" if may_be_list else "a token id"
                raise ClearheadError(f"{self.where}: {name!r} must be {description}, not {quote(value)}")
        return None if not ids else ids if isinstance(value, list) else ids[0]

    def special_ids(self) -> dict[str, int | list[int]]:
        """Return the ids of special tokens; they do not affect the network and are kept from load to save."""
        found = {name: self.token_ids(name) for name in (*_SPECIAL_IDS, *GENERATION_IDS)}
        return {name: ids for name, ids in found.items() if ids is not None}

    def activation(self, name: str, default: str | None = None) -> Activation:
        """Return our name of an activation function."""
        value = self.string(name, default)
        if value not in _ACTIVATIONS_BY_NAME:
            raise unknown_name(f"activation in {self.where}:", value, _ACTIVATIONS_BY_NAME)
        return _ACTIVATIONS_BY_NAME[value]

    def allow_only(self, name: str, *values: Any) -> None:
        """Raise ClearheadError if the setting is present with any value but these.

        For settings that change the result in a way that the family does not implement.
        """
        value = self.data.get(name)
        if value is not None and value not in values:
            raise ClearheadError(f"{self.where}: {name!r} is {quote(value)}, which is not supported")
