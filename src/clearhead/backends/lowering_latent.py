"""Lower latent attention to its absorbed form, in which all heads share one key and one value per token.

latent = lower_latent(module); inputs = merge_latent_inputs(module)
"""

from dataclasses import dataclass, replace

from torch import Tensor

from clearhead.architecture import GroupedAttention, LatentAttention
from clearhead.backends.lowering_norms import NormSettings, lower_norm
from clearhead.backends.lowering_projections import Projection, merge_projections
from clearhead.model import LatentAttentionLayer


@dataclass(frozen=True)
class LoweredLatent:
    """What latent attention has in addition to the heads of its absorbed form."""

    config: LatentAttention
    query_norm: NormSettings | None  # the norm of compressed queries
    query_up: Projection | None
    latent_norm: NormSettings | None
    to_key: tuple[Projection, ...]  # for each head (R, P): the plain part of a query to latents
    to_value: tuple[Projection, ...]  # (V, R): from attended latents to values

    @property
    def absorbed_width(self) -> int:
        """Width of a query and key in the absorbed form: latent and rotary key side by side."""
        return self.config.latent_rank + self.config.rotary_width


def cached_attention(config: LatentAttention) -> GroupedAttention:
    """Return attention with one head, which stores what the cache holds of a token: latent and rotary key."""
    return GroupedAttention(
        num_heads=config.num_heads,
        num_kv_heads=1,
        head_width=config.latent_rank,
        value_width=config.rotary_width,
        position=replace(config.rope, width=config.rotary_width),
        pattern=config.pattern,
    )


def merge_latent_inputs(module: LatentAttentionLayer, keep_formats: bool = False) -> Projection:
    """Return the projection to queries, or compressed ones, and to latents; `keep_formats` as in merge_projections."""
    query = module.query if module.config.query_rank is None else module.query_down
    return merge_projections(query, module.latent, keep_formats=keep_formats)


def lower_latent(module: LatentAttentionLayer) -> LoweredLatent:
    """Collect the weights of a latent attention layer; those of each head are copied."""
    config = module.config
    has_rank = config.query_rank is not None
    unfold: Tensor = module.unfold.weight.detach().view(config.num_heads, -1, config.latent_rank)  # (N, P + V, R)
    to_key, to_value = unfold.split((config.plain_width, config.value_width), dim=1)
    return LoweredLatent(
        config,
        lower_norm(module.query_norm) if has_rank else None,
        merge_projections(module.query_up) if has_rank else None,
        lower_norm(module.latent_norm),
        tuple(Projection(weight, None) for weight in to_key.transpose(1, 2).contiguous()),
        tuple(Projection(weight, None) for weight in to_value.contiguous()),
    )
