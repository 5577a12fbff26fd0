"""The key-value cache of a batch: what every layer stores of past tokens, and where these tokens are.

    cache = KeyValueCache(config)
    logits = network(prompt, cache=cache); cache.advance(); logits = network(next_token, cache=cache)

The network writes keys and values, and the caller advances. Until then, the same tokens or others may be run again in
their place. All sequences of a batch share their slots: shorter ones are padded on the left, and padding is masked.
"""

from pathlib import Path

import torch
from torch import Tensor

from clearhead.architecture import (
    AttentionPattern,
    Bidirectional,
    CenteredWindow,
    Chunked,
    GroupedAttention,
    LatentAttention,
    Layer,
    ModelConfig,
    SlidingWindow,
)
from clearhead.cache.stores import EMPTY, ContiguousStore, ReservedSlot, SlidingStore, Store
from clearhead.errors import ClearheadError, require
from clearhead.model import AttentionIndices, positions_from_mask
from clearhead.tensor_files import read_safetensors, write_safetensors


def _build_store(layer: Layer, slack: int) -> Store:
    """Return the store that a layer's attention pattern needs."""
    match layer.attention.pattern:
        case SlidingWindow(size=size) | Chunked(size=size):
            return SlidingStore(size, slack)
        case Bidirectional() | CenteredWindow():
            raise ClearheadError(
                "bidirectional layers cannot be cached, because new tokens change the earlier ones; run without a cache"
            )
    return ContiguousStore()


class KeyValueCache:
    """Keys and values of past tokens.

    slack: how many tokens a sliding window can be truncated by; also how many new tokens fit without a copy.
    stores: one store per layer, instead of those that the layers' attention patterns ask for.
    """

    def __init__(self, config: ModelConfig, slack: int = 16, stores: list[Store] | None = None):
        assert config.decoder is not None
        require(slack >= 0, f"slack is {slack}; it must be 0 or more")
        self.config = config
        self.slack = slack
        self.stores = stores or [_build_store(layer, slack) for layer in config.decoder.layers]
        # Layers with the same pattern store the same tokens, so any of their stores will do.
        self.store_by_pattern: dict[AttentionPattern, Store] = {
            layer.attention.pattern: store for layer, store in zip(config.decoder.layers, self.stores, strict=True)
        }
        self.length = 0  # past tokens
        self.peak_length = 0  # largest length ever reached; decides what a ring buffer has overwritten
        self.num_new = 0  # tokens written since the last `advance`
        self.attention_mask: Tensor | None = None  # (B, S) bool, of past and new tokens; None: no padding
        self.device: torch.device | None = None
        # The plan of the CPU kernels that wrote last: if it is the same one again, it need not check the modules anew.
        self.last_writer: object = None

    @property
    def batch_size(self) -> int | None:
        """Number of sequences, or None before the first write."""
        return next((len(tensor) for store in self.stores for tensor in store.tensors().values()), None)

    # --- the protocol of model/context.py

    def prepare(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Register new tokens (B, T) and return their positions (B or 1, T)."""
        if self.batch_size not in (None, len(tokens)):
            raise ClearheadError(
                f"the cache holds {self.batch_size} sequences, but the input has {len(tokens)}; "
                "use KeyValueCache.select to change the sequences of the cache"
            )
        self.num_new = tokens.shape[1]
        self.device = tokens.device
        self.peak_length = max(self.peak_length, self.length + self.num_new)
        if mask is None and self.attention_mask is None:
            return torch.arange(self.length, self.length + self.num_new, device=tokens.device)[None]
        new = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
        if self.attention_mask is None:
            past = new.new_ones(len(new), self.length)
        else:
            past = self.attention_mask[:, : self.length]
        attention_mask = torch.cat((past, new), dim=1)
        self.check_padding(attention_mask)
        self.attention_mask = attention_mask
        return positions_from_mask(tokens, attention_mask)[:, self.length :]

    def check_padding(self, attention_mask: Tensor) -> None:
        """Raise ClearheadError if a model with sliding windows gets padding after a real token.

        A window counts real tokens, but a ring counts slots: such padding would push tokens out too early.
        """
        has_ring = any(isinstance(store, SlidingStore) for store in self.stores)
        if has_ring and (attention_mask.int().diff(dim=1) < 0).any():
            raise ClearheadError("a cache with sliding windows takes padding on the left only; pad before the tokens")

    def attention_indices(self, pattern: AttentionPattern) -> AttentionIndices:
        """Return the indices of the new tokens and of the keys stored for layers with this pattern."""
        store = self.store_by_pattern[pattern]
        key_index = store.token_indices(self.length, self.num_new).to(self.device)
        is_contiguous = isinstance(store, ContiguousStore)
        if self.attention_mask is None:
            query_index = torch.arange(self.length, self.length + self.num_new, device=self.device)[None]
            is_real = None if is_contiguous else (key_index != EMPTY)[None]
            return AttentionIndices(query_index, key_index[None], is_real, contiguous_keys=is_contiguous)
        positions = positions_from_mask(self.attention_mask, self.attention_mask)
        slots = key_index.clamp(min=0)
        is_real = self.attention_mask[:, slots] & (key_index != EMPTY)
        return AttentionIndices(
            positions[:, self.length :], positions[:, slots], is_real, contiguous_keys=is_contiguous
        )

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new keys and values (B, K, T, H) of a layer and return all to attend to (B, K, S, H)."""
        return self.stores[layer].write(self.length, key, value)

    # --- for kernels that use the buffers in place

    @property
    def is_contiguous(self) -> bool:
        """Whether token t is in slot t of every layer; otherwise a layer has a ring buffer."""
        return all(isinstance(store, ContiguousStore) for store in self.stores)

    def buffers(self) -> list[Tensor]:
        """Return the keys and values (B, K, capacity, H) of all layers that have been written."""
        return [buffer for store in self.stores for buffer in (store.key, store.value) if buffer is not None]

    def reserve(self, layer: int, shape: tuple[int, int, int, int], num_new: int, dtype: torch.dtype) -> ReservedSlot:
        """Make room in a layer for `num_new` tokens that a kernel on the CPU will write.

        shape: (B, K, H, H of the values).

        Several tokens at once need a contiguous store.
        """
        store, device = self.stores[layer], torch.device("cpu")
        if num_new == 1:
            return store.reserve(self.length, shape, dtype, device)
        zero = torch.zeros((), dtype=dtype, device=device)
        key, value = (zero.expand(*shape[:2], num_new, width) for width in shape[2:])
        return ReservedSlot(*store.write(self.length, key, value), self.length, self.length + num_new)

    # --- for the decoding loop

    def advance(self) -> None:
        """Make the new tokens part of the past."""
        for store in self.stores:
            store.advance()
        self.length += self.num_new
        self.num_new = 0

    def advance_by(self, num_new: int) -> None:
        """Record that a kernel wrote `num_new` tokens into the stores' buffers, and make them part of the past."""
        self.num_new = num_new
        self.peak_length = max(self.peak_length, self.length + num_new)
        self.advance()

    def truncate(self, length: int) -> None:
        """Keep only the first `length` tokens."""
        if not 0 <= length <= self.length:
            raise ClearheadError(f"the cache holds {self.length} tokens; it cannot be truncated to {length}")
        peak_length = self.peak_length if length < self.length else length
        for store in self.stores:
            store.truncate(peak_length, length)
        self.attention_mask = None if self.attention_mask is None else self.attention_mask[:, :length]
        self.peak_length = self.peak_length if length else 0
        self.length = length
        self.num_new = 0

    def select(self, indices: Tensor) -> "KeyValueCache":
        """Return a copy with the sequences at these batch indices, in this order. An index may be repeated."""
        other = KeyValueCache(self.config, self.slack, [store.select(indices) for store in self.stores])
        other.length = self.length
        other.peak_length = self.peak_length
        other.device = self.device
        other.last_writer = self.last_writer
        other.attention_mask = None if self.attention_mask is None else self.attention_mask[indices, : self.length]
        return other

    def reorder(self, indices: Tensor) -> None:
        """Replace sequence b by sequence indices[b], in place. The batch size stays, and no step may be pending."""
        assert self.num_new == 0, "new tokens have been written; call advance first"
        for store in self.stores:
            store.reorder(indices, self.length)
        self.attention_mask = None if self.attention_mask is None else self.attention_mask[indices, : self.length]

    def fork(self) -> "KeyValueCache":
        """Return an independent copy."""
        return self.select(torch.arange(self.batch_size or 0, device=self.device))

    @property
    def num_bytes(self) -> int:
        """Bytes of the stored keys and values. The buffers may be larger, see `allocated_bytes`."""
        return sum(store.num_bytes(self.length) for store in self.stores)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all buffers."""
        tensors = (tensor for store in self.stores for tensor in store.tensors().values())
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    # --- saved caches: a safetensors file with the tensors "{layer}.key", "{layer}.value" and, with padding, "real"
    # (attention_mask), and the metadata "length", "slack" and "furthest" (peak_length)

    def save(self, path: str | Path) -> None:
        """Write the cache to a safetensors file."""
        tensors = {f"{n}.{name}": t for n, store in enumerate(self.stores) for name, t in store.tensors().items()}
        if self.attention_mask is not None:
            tensors["real"] = self.attention_mask[:, : self.length]
        contiguous = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
        numbers = {"length": self.length, "furthest": self.peak_length, "slack": self.slack}
        write_safetensors(Path(path), contiguous, {name: str(number) for name, number in numbers.items()})

    @staticmethod
    def load(path: str | Path, config: ModelConfig, device: torch.device | str = "cpu") -> "KeyValueCache":
        """Read a cache that `save` wrote. Raise ClearheadError if it does not belong to a model with this config."""
        tensors, metadata = read_safetensors(Path(path))
        try:
            cache = KeyValueCache(config, int(metadata["slack"]))
            cache.length = int(metadata["length"])
            cache.peak_length = int(metadata["furthest"])
            cache.device = torch.device(device)
            cache.restore({name: tensor.to(device) for name, tensor in tensors.items()})
        except (KeyError, ValueError) as error:
            raise ClearheadError(f"{path} is not a cache of this model: {error}") from None
        return cache

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take over the tensors that `save` wrote. Raise ClearheadError if one does not fit this model and length."""
        require(0 <= self.length <= self.peak_length, f"length {self.length} is not between 0 and {self.peak_length}")
        if not tensors and not self.length:
            return
        layers = self.config.decoder.layers if self.config.decoder else ()
        for number, (layer, store) in enumerate(zip(layers, self.stores, strict=True)):
            key, value = tensors.pop(f"{number}.key"), tensors.pop(f"{number}.value")
            shapes = [(*part.shape[1:2], *part.shape[3:], part.is_floating_point()) for part in (key, value)]
            heads, *widths = key_value_shape(layer.attention)
            require(
                shapes == [(heads, width, True) for width in widths],
                f"the heads of layer {number} do not match the config",
            )
            store.restore(key, value, self.length)
        batch_sizes = {len(tensor) for store in self.stores for tensor in store.tensors().values()}
        require(len(batch_sizes) == 1, "its layers have different batch sizes")
        if tensors:
            mask = tensors.pop("real")
            require(mask.shape == (*batch_sizes, self.length), f"its mask has shape {tuple(mask.shape)}")
            require(mask.dtype == torch.bool, f"its mask is {mask.dtype}, not bool")
            self.attention_mask = mask
        require(not tensors, f"it has unknown tensors: {', '.join(tensors)}")


def key_value_shape(attention: GroupedAttention | LatentAttention) -> tuple[int, int, int]:
    """Return what a cache stores per token: number of heads, width of a key, width of a value (see stores.py)."""
    match attention:
        case GroupedAttention():
            return attention.num_kv_heads, attention.head_width, attention.value_width or attention.head_width
        case LatentAttention():
            return 1, attention.latent_rank, attention.rotary_width
