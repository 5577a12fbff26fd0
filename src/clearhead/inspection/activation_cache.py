"""ActivationCache: the activations of a forward pass by the names of hook points and TransformerLens's shorthands.

cache["pattern", 0]                 # cache["blocks.0.attn.hook_pattern"]
cache["resid_post", -1]             # of the last layer
cache["scale", 2, "ln1"]            # cache["blocks.2.ln1.hook_scale"]
cache.stack_activation("z")         # of all layers, (L, B, T, N, H)
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from clearhead.errors import ClearheadError, unknown_name

_SHORT_NAMES = {
    "attn": "pattern",
    "attn_logits": "attn_scores",
    "key": "k",
    "query": "q",
    "value": "v",
    "mlp_pre": "pre",
    "mlp_post": "post",
}
_PARTS = {"a": "attn", "attention": "attn", "m": "mlp", "b": "", "block": "", "blocks": ""}
_ATTENTION_POINTS = ("q", "k", "v", "z", "rot_q", "rot_k", "attn_scores", "pattern")
_FEED_FORWARD_POINTS = ("pre", "pre_linear", "post")
_NORM_POINTS = ("scale", "normalized")

Shorthand = str | tuple[str, int] | tuple[str, int, str] | tuple[str, None]


def activation_name(point: str, layer: int | None = None, part: str | None = None) -> str:
    """Return the full name of a hook point: ("pattern", 0) -> "blocks.0.attn.hook_pattern".

    part: the part of a block, for points that several have: "ln1" and "ln2" have "scale" and "normalized".
    """
    if "." in point or point.startswith("hook_"):
        return point if layer is None else f"blocks.{layer}.{point}"
    point = _SHORT_NAMES.get(point, point)
    part = _PARTS.get(part or "", part or "")
    if not part and point in _ATTENTION_POINTS:
        part = "attn"
    elif not part and point in _FEED_FORWARD_POINTS:
        part = "mlp"
    elif not part and point in _NORM_POINTS and layer is None:
        part = "ln_final"
    prefix = "" if layer is None else f"blocks.{layer}."
    return f"{prefix}{part + '.' if part else ''}hook_{point}"


class ActivationCache(Mapping[str, Tensor]):
    """The activations of one forward pass, by the names of hook points or by shorthands."""

    def __init__(self, activations: dict[str, Tensor], num_layers: int):
        self.activations, self.num_layers = activations, num_layers

    def __getitem__(self, key: Shorthand) -> Tensor:
        name = self.full_name(key)
        if name not in self.activations:
            raise unknown_name("activation", name, self.activations)
        return self.activations[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.activations)

    def __len__(self) -> int:
        return len(self.activations)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, (str, tuple)) and self.full_name(key) in self.activations

    def __repr__(self) -> str:
        return f"ActivationCache of {len(self)} activations in {self.num_layers} layers"

    def full_name(self, key: Shorthand) -> str:
        """Return the name that a key means; negative layers count from the last."""
        if isinstance(key, str):
            return key if key in self.activations else activation_name(key)
        point, layer, *part = key
        if layer is not None and layer < 0:
            layer += self.num_layers
        return activation_name(point, layer, *part)

    def stack_activation(self, point: str, layer: int = -1, sublayer_type: str | None = None) -> Tensor:
        """Return an activation of all layers up to `layer`, one after the other (L, ...); -1: of all layers."""
        count = self.num_layers if layer == -1 else layer
        part = () if sublayer_type is None else (sublayer_type,)
        return torch.stack([self.activations_at(point, number, *part) for number in range(count)])

    def activations_at(self, point: str, layer: int, *part: str) -> Tensor:
        """Return the activation of one layer."""
        return self[(point, layer, *part)]  # type: ignore[index]

    def accumulated_resid(self, layer: int | None = None, *, incl_mid: bool = False) -> Tensor:
        """Return the residual stream before each layer up to `layer` (L + 1, B, T, D); None: up to the end."""
        end = self.num_layers if layer is None or layer == -1 else layer
        parts = []
        for number in range(end):
            parts.append(self["resid_pre", number])
            if incl_mid:
                parts.append(self["resid_mid", number])
        parts.append(self["resid_post", end - 1] if end == self.num_layers else self["resid_pre", end])
        return torch.stack(parts)

    def remove_batch_dim(self) -> "ActivationCache":
        """Return the activations of a single text without the batch dimension."""
        if any(len(tensor) != 1 for tensor in self.activations.values()):
            raise ClearheadError("the cache holds several texts; take one with cache[name][index]")
        return ActivationCache({name: tensor[0] for name, tensor in self.activations.items()}, self.num_layers)

    def to(self, device: torch.device | str) -> "ActivationCache":
        """Return the activations on a device."""
        moved = {name: tensor.to(device) for name, tensor in self.activations.items()}
        return ActivationCache(moved, self.num_layers)
