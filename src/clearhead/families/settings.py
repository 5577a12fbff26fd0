"""Reading a foreign config.json: typed, with defaults, and one clear sentence for a value that cannot be.

settings = Settings(json_data, "config.json"); width = settings.whole("hidden_size")
"""

from collections.abc import Mapping
from typing import Any

from clearhead.architecture import Activation
from clearhead.errors import ClearheadError, unknown_name

# transformers' activation names; `gelu_fast` and `gelu_pytorch_tanh` differ from `gelu_new` in rounding only
ACTIVATION_NAMES: dict[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "gelu_quick",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
ACTIVATION_NAMES_BACK: dict[Activation, str] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "gelu_quick": "quick_gelu",
    "silu": "silu",
    "tanh": "tanh",
}

SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
LARGEST_SIZE = 10**9  # no width, vocabulary or context of a model comes near; a corrupt file does
LARGEST_DEPTH = 1000  # layers, each of which is built; the deepest released model has 126


class Settings:
    """A null counts as absent, as in transformers."""

    def __init__(self, data: Any, where: str):
        if not isinstance(data, Mapping):
            raise ClearheadError(f"{where} must hold a JSON object, not {type(data).__name__}")
        self.data, self.where = data, where

    def __contains__(self, name: str) -> bool:
        return self.data.get(name) is not None

    def _value(self, name: str, default: Any, kinds: type | tuple[type, ...], what: str) -> Any:
        value = self.data.get(name)
        if value is None:
            if default is None:
                raise ClearheadError(f"{self.where} has no {name!r}, which this model needs")
            return default
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            raise ClearheadError(f"{self.where}: {name!r} must be {what}, not {value!r}")
        return value

    def whole(self, name: str, default: int | None = None, at_least: int = 0) -> int:
        value: int = self._value(name, default, int, "a whole number")
        largest = LARGEST_DEPTH if "layer" in name else LARGEST_SIZE
        if not at_least <= value <= largest:
            raise ClearheadError(f"{self.where}: {name!r} is {value}; it must be from {at_least} to {largest}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default, (int, float), "a number")
        try:
            return float(value)
        except OverflowError:
            raise ClearheadError(f"{self.where}: {name!r} is too large a number") from None

    def flag(self, name: str, default: bool) -> bool:
        return bool(self._value(name, default, bool, "true or false"))

    def text(self, name: str, default: str | None = None) -> str:
        return str(self._value(name, default, str, "a string"))

    def items(self, name: str) -> list[Any]:
        """A list; empty where absent."""
        return list(self._value(name, (), (list, tuple), "a list"))

    def per_layer(self, name: str, num_layers: int) -> list[Any]:
        """A list with one entry for each layer; empty where absent."""
        given = self.items(name)
        if given and len(given) != num_layers:
            raise ClearheadError(f"{self.where}: {name!r} has {len(given)} entries for {num_layers} layers")
        return given

    def table(self, name: str) -> "Settings":
        """A nested object; empty where absent."""
        return Settings(self._value(name, {}, dict, "an object"), f"{self.where}: {name}")

    def token_ids(self, name: str) -> int | list[int] | None:
        """One id; of end tokens also a list of them. Null and -1, which some files write, are none."""
        value, several = self.data.get(name), name == "eos_token_id"
        ids = [one for one in (value if isinstance(value, list) and several else [value]) if one not in (None, -1)]
        for one in ids:
            if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one <= LARGEST_SIZE:
                right = "a token id or a list of them" if several else "a token id"
                raise ClearheadError(f"{self.where}: {name!r} must be {right}, not {value!r}")
        return None if not ids else ids if isinstance(value, list) else ids[0]

    def special_ids(self) -> dict[str, int | list[int]]:
        """Settings that say nothing of the network; kept from load to save."""
        found = {name: self.token_ids(name) for name in SPECIAL_IDS}
        return {name: ids for name, ids in found.items() if ids is not None}

    def activation(self, name: str, default: str | None = None) -> Activation:
        value = self.text(name, default)
        if value not in ACTIVATION_NAMES:
            raise unknown_name(f"activation in {self.where}:", value, ACTIVATION_NAMES)
        return ACTIVATION_NAMES[value]

    def refuse(self, name: str, *harmless: Any) -> None:
        """A setting that changes what is computed and that this family does not have."""
        value = self.data.get(name)
        if value is not None and value not in harmless:
            raise ClearheadError(f"{self.where}: {name!r} is {value!r}, which this family does not compute")
