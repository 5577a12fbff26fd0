"""The past of a batch: what every layer keeps, and where its tokens stand.

    cache = KeyValueCache(config)
    logits = network(prompt, cache=cache); cache.advance(); logits = network(next_token, cache=cache)

`network` writes, whoever runs it advances: until then the same tokens, or others, may be run again in their place.
Rows of a batch share their slots; a shorter one is padded on the left, and padding is never seen.
"""

from pathlib import Path

import torch
from torch import Tensor

from clearhead.architecture import (
    AttentionPattern,
    Bidirectional,
    Chunked,
    GroupedAttention,
    LatentAttention,
    Layer,
    ModelConfig,
    SlidingWindow,
)
from clearhead.cache.stores import EMPTY, ContiguousStore, SlidingStore, Store
from clearhead.errors import ClearheadError, require
from clearhead.files import write_safetensors
from clearhead.model import Grid, positions_from


def store_for(layer: Layer, slack: int) -> Store:
    match layer.attention.pattern:
        case SlidingWindow(size=size) | Chunked(size=size):
            return SlidingStore(size, slack)
        case Bidirectional():
            raise ClearheadError("a layer that sees what comes after cannot be cached: its past would change")
    return ContiguousStore()


class KeyValueCache:
    def __init__(self, config: ModelConfig, slack: int = 16, stores: list[Store] | None = None):
        assert config.decoder is not None
        require(slack >= 0, f"slack is {slack}; it must be 0 or more")
        self.config, self.slack = config, slack
        self.stores = stores or [store_for(layer, slack) for layer in config.decoder.layers]
        # Layers of one reach keep the same tokens: any of them can say which.
        self.by_reach: dict[AttentionPattern, Store] = {
            layer.attention.pattern: store for layer, store in zip(config.decoder.layers, self.stores, strict=True)
        }
        self.length = 0
        self.furthest = 0  # the most tokens ever written: a ring has lost those that lie too far behind
        self.num_new = 0
        self.real: Tensor | None = None  # (B, S) bool, of the past and what is new; None: no padding
        self.device: torch.device | None = None
        self.written_by: object = None  # a mark of whoever ran the last tokens and would know that their text goes on

    # --- what the network asks for (model/context.py)

    def begin(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        held = next(iter(self.stores[0].tensors().values()), None)
        if held is not None and len(held) != len(tokens):
            raise ClearheadError(f"the cache holds {len(held)} rows, and {len(tokens)} came in; see cache.select")
        self.num_new, self.device = tokens.shape[1], tokens.device
        self.furthest = max(self.furthest, self.length + self.num_new)
        if mask is None and self.real is None:
            return torch.arange(self.length, self.length + self.num_new, device=tokens.device)[None]
        new = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
        past = new.new_ones(len(new), self.length) if self.real is None else self.real[:, : self.length]
        real = torch.cat((past, new), dim=1)
        self.check_padding(real)
        self.real = real
        return positions_from(tokens, real)[:, self.length :]

    def check_padding(self, real: Tensor) -> None:
        """A window counts real tokens, a ring counts slots: padding in the middle would push tokens out too early."""
        slides = any(isinstance(store, SlidingStore) for store in self.stores)
        if slides and (real.int().diff(dim=1) < 0).any():
            raise ClearheadError("a model with windows takes padding on the left only when it generates")

    def grid(self, pattern: AttentionPattern) -> Grid:
        store = self.by_reach[pattern]
        slots = store.slots(self.length, self.num_new).to(self.device)
        whole = isinstance(store, ContiguousStore)
        if self.real is None:
            query = torch.arange(self.length, self.length + self.num_new, device=self.device)[None]
            return Grid(query, slots[None], None if whole else (slots != EMPTY)[None], whole=whole)
        positions, held = positions_from(self.real, self.real), slots.clamp(min=0)
        real = self.real[:, held] & (slots != EMPTY)
        return Grid(positions[:, self.length :], positions[:, held], real, whole=whole)

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return self.stores[layer].write(self.length, key, value)

    # --- what the loop does with it

    def advance(self) -> None:
        """The tokens last run are now the past."""
        for store in self.stores:
            store.advance()
        self.length, self.num_new = self.length + self.num_new, 0

    def wrote(self, num_new: int) -> None:
        """So many tokens more are there, written by a kernel into the stores' own buffers."""
        self.num_new, self.furthest = num_new, max(self.furthest, self.length + num_new)
        self.advance()

    def truncate(self, length: int) -> None:
        """Forget all after the first `length` tokens."""
        if not 0 <= length <= self.length:
            raise ClearheadError(f"the cache holds {self.length} tokens; it cannot be cut to {length}")
        furthest = self.furthest if length < self.length else length
        for store in self.stores:
            store.truncate(furthest, length)
        self.real = None if self.real is None else self.real[:, :length]
        self.furthest = self.furthest if length else 0
        self.length, self.num_new = length, 0

    def select(self, rows: Tensor) -> "KeyValueCache":
        """A cache of these rows of the batch, in this order and as often as they are named; a copy."""
        other = KeyValueCache(self.config, self.slack, [store.select(rows) for store in self.stores])
        other.length, other.furthest, other.device = self.length, self.furthest, self.device
        other.written_by = self.written_by
        other.real = None if self.real is None else self.real[rows, : self.length]
        return other

    def reorder(self, rows: Tensor) -> None:
        """Row b becomes what row rows[b] was, in place: as many rows as there are, between two steps."""
        assert self.num_new == 0, "tokens that were run are not yet taken up: advance first"
        for store in self.stores:
            store.reorder(rows, self.length)
        self.real = None if self.real is None else self.real[rows, : self.length]

    def fork(self) -> "KeyValueCache":
        """A copy that goes its own way."""
        held = next((tensor for store in self.stores for tensor in store.tensors().values()), None)
        return self.select(torch.arange(0 if held is None else len(held), device=self.device))

    @property
    def num_bytes(self) -> int:
        """Of the keys and values held; buffers may be larger (`allocated_bytes`)."""
        return sum(store.num_bytes(self.length) for store in self.stores)

    @property
    def allocated_bytes(self) -> int:
        tensors = (tensor for store in self.stores for tensor in store.tensors().values())
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    # --- kept on disk

    def save(self, path: str | Path) -> None:
        tensors = {f"{n}.{name}": t for n, store in enumerate(self.stores) for name, t in store.tensors().items()}
        if self.real is not None:
            tensors["real"] = self.real[:, : self.length]
        contiguous = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
        numbers = {"length": self.length, "furthest": self.furthest, "slack": self.slack}
        write_safetensors(Path(path), contiguous, {name: str(number) for name, number in numbers.items()})

    @staticmethod
    def load(path: str | Path, config: ModelConfig, device: torch.device | str = "cpu") -> "KeyValueCache":
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                about: dict[str, str] = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
            cache = KeyValueCache(config, int(about["slack"]))
            cache.length, cache.furthest = int(about["length"]), int(about["furthest"])
            cache.device = torch.device(device)
            cache.restore(tensors)
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise ClearheadError(f"{path} is not a cache of this model: {error}") from None
        return cache

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `save` wrote, if every shape is that of this model and this length."""
        require(0 <= self.length <= self.furthest, f"{self.length} tokens of at most {self.furthest}")
        if not tensors and not self.length:
            return
        layers = self.config.decoder.layers if self.config.decoder else ()
        for number, (layer, store) in enumerate(zip(layers, self.stores, strict=True)):
            key, value = tensors.pop(f"{number}.key"), tensors.pop(f"{number}.value")
            found = [(*part.shape[1:2], *part.shape[3:], part.is_floating_point()) for part in (key, value)]
            heads, *widths = cached_shape(layer.attention)
            require(found == [(heads, width, True) for width in widths], f"layer {number} has other heads")
            store.restore(key, value, self.length)
        rows = {len(tensor) for store in self.stores for tensor in store.tensors().values()}
        require(len(rows) == 1, "its layers hold different numbers of rows")
        if tensors:
            real = tensors.pop("real")
            require(real.shape == (*rows, self.length), f"padding of shape {tuple(real.shape)}")
            require(real.dtype == torch.bool, "padding of another type")
            self.real = real
        require(not tensors, f"it holds {', '.join(tensors)} besides")


def cached_shape(attention: GroupedAttention | LatentAttention) -> tuple[int, int, int]:
    """Heads kept of every token, and the widths of what stands for key and value (stores.py)."""
    match attention:
        case GroupedAttention():
            return attention.num_kv_heads, attention.head_width, attention.value_width or attention.head_width
        case LatentAttention():
            return 1, attention.latent_rank, attention.rotary_width
