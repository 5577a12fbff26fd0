"""Points inside a network with the names that the TransformerLens library gives them, where functions can be applied.

    hooked = hook_network(network, lambda name, value: value)     # a copy that shares the weights

hook_embed, hook_pos_embed                        embeddings (B, T, D)
blocks.0.hook_resid_pre, hook_resid_mid, hook_resid_post
                                                  the residual stream before, in and after a block (B, T, D)
blocks.0.ln1, ln2, ln1_post, ln2_post, ln_final   norms: hook_scale (B, T, 1), hook_normalized (B, T, D)
blocks.0.attn.hook_q, hook_k, hook_v              of each head, before norms and rotation (B, T, N or K, H)
blocks.0.attn.hook_rot_q, hook_rot_k              after them
blocks.0.attn.hook_attn_scores, hook_pattern      scores with the mask, and weights (B, N, T, S)
blocks.0.attn.hook_z                              outputs of the heads (B, T, N, H)
blocks.0.hook_attn_out, hook_mlp_out              what the branches add to the residual stream (B, T, D)
blocks.0.mlp.hook_pre, hook_pre_linear, hook_post the hidden layer of feed-forward (B, T, F)

A network has those of its parts: a parallel block has no hook_resid_mid, a mixture of experts no hidden layer. Of a
block with norms after the sums (BERT), hook_resid_mid and hook_resid_post are the sums, and its output is
hook_normalized_resid_post.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from clearhead.architecture import GroupedAttention, Rope
from clearhead.errors import ClearheadError
from clearhead.inspection.intervention import copy_module
from clearhead.model import (
    AttentionKernel,
    Block,
    FeedForwardLayer,
    LayerStack,
    RmsNormLayer,
    Scoring,
    Transformer,
    compute_scores,
    explicit_mask,
    weigh_keys,
    weigh_values,
)

Apply = Callable[[str, Tensor], Tensor]  # name of a point and its value -> the value to go on with


def hook_network(network: Transformer, apply: Apply) -> tuple[Transformer, AttentionKernel]:
    """Return a copy of a network that calls `apply` at every point, and the kernel to run it with.

    The copy shares the weights; the network itself is unaffected. The kernel serves one forward pass.
    """
    if network.config.is_encoder_decoder:
        raise ClearheadError("hook points are those of a single stack; use model.trace for an encoder-decoder")
    copied = cast(Transformer, copy_module(network))
    stack = cast(LayerStack, _own_child(copied, "decoder" if network.decoder is not None else "encoder"))
    embedding = _own_child(stack, "embedding")
    scale = stack.stack.token_embedding.scale
    _on_output(_own_child(embedding, "tokens"), lambda x: apply("hook_embed", x * scale) / scale)
    if stack.token_embedding.positions is not None:
        _on_output(_own_child(embedding, "positions"), partial(apply, "hook_pos_embed"))
    layers = _own_child(stack, "layers")
    for number in range(len(stack.stack.layers)):
        _hook_block(cast(Block, _own_child(layers, str(number))), f"blocks.{number}.", apply)
    _hook_norm(stack, "final_norm", "ln_final.", apply)
    return copied, _HookedKernel(stack, apply)


def _hook_block(block: Block, prefix: str, apply: Apply) -> None:
    """Add the hook points of one block."""
    placement = block.layer.placement
    _on_input(block, partial(apply, f"{prefix}hook_resid_pre"))
    first = _own_child(block, "attention_residual")
    second = first if placement == "parallel" else _own_child(block, "feed_forward_residual")
    for residual, number in ((first, 1), (second, 2)) if second is not first else ((first, 1),):
        _hook_norm(residual, "norm", f"{prefix}ln{number}.", apply)
        _hook_norm(residual, "branch_norm", f"{prefix}ln{number}_post.", apply)
    attention, feed_forward = _own_child(block, "attention"), _own_child(block, "feed_forward")
    if placement == "parallel":  # one residual connection adds the sum of both branches
        _on_output(attention, partial(apply, f"{prefix}hook_attn_out"))
        _on_output(feed_forward, partial(apply, f"{prefix}hook_mlp_out"))
    else:  # dropout is the last module of a branch
        _on_output(_own_child(first, "dropout"), partial(apply, f"{prefix}hook_attn_out"))
        _on_output(_own_child(second, "dropout"), partial(apply, f"{prefix}hook_mlp_out"))
    if placement == "post":
        _on_input(_own_child(first, "norm"), partial(apply, f"{prefix}hook_resid_mid"))
        _on_input(_own_child(second, "norm"), partial(apply, f"{prefix}hook_resid_post"))
        _on_output(block, partial(apply, f"{prefix}hook_normalized_resid_post"))
    else:
        if placement not in ("parallel", "parallel_norms"):
            _on_input(second, partial(apply, f"{prefix}hook_resid_mid"))
        _on_output(block, partial(apply, f"{prefix}hook_resid_post"))
    _hook_attention(attention, block.layer.attention, f"{prefix}attn.", apply)
    _hook_feed_forward(feed_forward, f"{prefix}mlp.", apply)


def _hook_attention(attention: nn.Module, config: Any, prefix: str, apply: Apply) -> None:
    """Add the points of queries, keys, values and head outputs; latent attention has only the last."""
    _on_input(_own_child(attention, "output"), _in_heads(config.num_heads, partial(apply, f"{prefix}hook_z")))
    if isinstance(config, GroupedAttention):
        for name, heads in (("query", config.num_heads), ("key", config.num_kv_heads), ("value", config.num_kv_heads)):
            point = partial(apply, f"{prefix}hook_{name[0]}")
            _on_output(_own_child(attention, name), _in_heads(heads, point))


def _hook_feed_forward(layer: nn.Module, prefix: str, apply: Apply) -> None:
    """Add the points of the hidden layer."""
    if not isinstance(layer, FeedForwardLayer):
        return
    _on_input(_own_child(layer, "down"), partial(apply, f"{prefix}hook_post"))
    up = "hook_pre" if layer.gate is None else "hook_pre_linear"
    _on_output(_own_child(layer, "up"), partial(apply, prefix + up))
    if layer.gate is not None:
        _on_output(_own_child(layer, "gate"), partial(apply, f"{prefix}hook_pre"))


class _HookedNorm(nn.Module):
    """A norm with points at its scale and at what it normalizes, as TransformerLens defines them."""

    def __init__(self, norm: nn.Module, prefix: str, apply: Apply):
        super().__init__()
        self.norm, self.prefix, self.apply_at = norm, prefix, apply

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, D) -> (B, T, D). A LayerNorm's value is its output, an RMSNorm's that before its weight."""
        norm, wide = self.norm, x.to(torch.promote_types(x.dtype, torch.float32))
        if isinstance(norm, RmsNormLayer):
            y = wide / self.scale_of(wide, norm.config.epsilon)
            y = self.apply_at(f"{self.prefix}hook_normalized", y)
            return (y * (1 + norm.weight if norm.config.unit_offset else norm.weight)).to(x.dtype)
        if type(norm) is nn.LayerNorm:
            centered = wide - wide.mean(-1, keepdim=True)
            y = centered / self.scale_of(centered, norm.eps)
            y = y if norm.weight is None else y * norm.weight
            y = y if norm.bias is None else y + norm.bias
            return self.apply_at(f"{self.prefix}hook_normalized", y.to(x.dtype))
        return self.apply_at(f"{self.prefix}hook_normalized", norm(x))

    def scale_of(self, x: Tensor, epsilon: float) -> Tensor:
        """Return the root of the mean square, (B, T, 1), after its point."""
        return self.apply_at(f"{self.prefix}hook_scale", (x.square().mean(-1, keepdim=True) + epsilon).sqrt())


def _hook_norm(owner: nn.Module, name: str, prefix: str, apply: Apply) -> None:
    """Replace a norm by one with hook points; a place without a norm stays as it is."""
    norm = cast(nn.Module, owner._modules[name])
    if not isinstance(norm, nn.Identity):
        owner._modules[name] = _HookedNorm(norm, prefix, apply)


class _HookedKernel:
    """An attention kernel with points. Layers call it in order, so counting its calls gives their numbers."""

    __name__ = "hooked_attention"

    def __init__(self, stack: LayerStack, apply: Apply):
        self.rotates = [isinstance(layer.attention.position, Rope) for layer in stack.stack.layers]
        self.apply_at, self.num_calls = apply, 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """Return the outputs of the heads (B, N, T, H)."""
        layer, self.num_calls = self.num_calls, self.num_calls + 1
        prefix = f"blocks.{layer}.attn."
        if self.rotates[layer]:
            q = self.apply_at(f"{prefix}hook_rot_q", q.transpose(1, 2)).transpose(1, 2)
            k = self.apply_at(f"{prefix}hook_rot_k", k.transpose(1, 2)).transpose(1, 2)
        scores, allowed = compute_scores(q, k, scoring), explicit_mask(scoring.mask, q, k)
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -torch.inf)
        scores = self.apply_at(f"{prefix}hook_attn_scores", scores)
        weights = self.apply_at(f"{prefix}hook_pattern", weigh_keys(scores, allowed, scoring).to(v.dtype))
        return weigh_values(weights, v)


# --- modules


def _own_child(module: nn.Module, name: str) -> nn.Module:
    """Replace a submodule by a copy of its own, and return the copy."""
    child = module._modules[name] = copy_module(cast(nn.Module, module._modules[name]))
    return child


def _on_input(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Pass the first argument of a module through `change`."""
    module.register_forward_pre_hook(lambda module, inputs: (change(inputs[0]), *inputs[1:]))


def _on_output(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Pass the output of a module through `change`."""
    module.register_forward_hook(lambda module, inputs, output: change(output))


def _in_heads(num_heads: int, change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return `change` for a tensor (B, T, N·H) that it receives as (B, T, N, H)."""
    return lambda x: change(x.unflatten(-1, (num_heads, -1))).flatten(-2)
