"""Multi-head latent attention (DeepSeek-V2, §2.1): keys and values are unfolded from one small vector per token.

    layer = LatentAttentionLayer(config, width=64); y = layer(x, context)

    latent c = norm(W_down x) (B, 1, S, R)    rotary key r = rotate(W_rot x) (B, 1, S, H_r), shared by all heads
    unfolded:  k_n = [U_n c | r],  v_n = V_n c            q_n = [p_n | rotate(r_n)]
    absorbed:  q_n = [U_nᵀ p_n | rotate(r_n)] against [c | r], then V_n on the result

Both give the same output, since p·(U c) = (Uᵀp)·c. In the absorbed form, all heads share one key and one value of
width R, so a cache stores R + H_r numbers per token. Our p and r of a query are the paper's q^C and q^R; `unfold` is
W^UK and W^UV together.
"""

import torch
from torch import Tensor, nn

from clearhead.architecture import LatentAttention, RmsNorm
from clearhead.model.attend import AttentionKernel, Scoring
from clearhead.model.attention import merge_heads, split_heads
from clearhead.model.context import AttentionContext
from clearhead.model.norms import build_norm


class LatentAttentionLayer(nn.Module):
    """Latent attention, computed unfolded or absorbed (`AttentionContext.absorb`)."""

    def __init__(self, config: LatentAttention, width: int, dropout: float = 0.0):
        super().__init__()
        self.config = config
        self.dropout = dropout
        num_heads, value_width = config.num_heads, config.value_width
        plain_width, rotary_width = config.plain_width, config.rotary_width
        norm = RmsNorm(epsilon=config.latent_epsilon)
        self.scale = (plain_width + rotary_width) ** -0.5 if config.scale is None else config.scale
        if config.query_rank is None:
            self.query = nn.Linear(width, num_heads * (plain_width + rotary_width), bias=False)
        else:
            self.query_down = nn.Linear(width, config.query_rank, bias=False)
            self.query_norm = build_norm(norm, config.query_rank)
            self.query_up = nn.Linear(config.query_rank, num_heads * (plain_width + rotary_width), bias=False)
        self.latent = nn.Linear(width, config.latent_rank + rotary_width, bias=False)
        self.latent_norm = build_norm(norm, config.latent_rank)
        self.unfold = nn.Linear(config.latent_rank, num_heads * (plain_width + value_width), bias=False)
        self.output = nn.Linear(num_heads * value_width, width, bias=False)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """x (B, T, D) -> (B, T, D)."""
        p, r = self.queries(x, context)
        latent, rotary_key = self.compress(x, context)
        if context.write_cache is not None:
            latent, rotary_key = context.write_cache(latent, rotary_key)
        attend = self.attend_absorbed if context.absorb else self.attend_unfolded
        scoring = Scoring(mask=context.mask, scale=self.scale, dropout=self.dropout if self.training else 0.0)
        return self.output(merge_heads(attend(p, r, latent, rotary_key, context.kernel, scoring)))

    def queries(self, x: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:
        """Return the plain queries p (B, N, T, plain_width) and the rotated queries r (B, N, T, rotary_width)."""
        if self.config.query_rank is None:
            q = self.query(x)
        else:
            q = self.query_up(self.query_norm(self.query_down(x)))
        q = split_heads(q, self.config.num_heads)
        p, r = q.split((self.config.plain_width, self.config.rotary_width), dim=-1)
        assert context.rotation is not None
        return p, context.rotation.rotate(r)

    def compress(self, x: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:
        """Return what a cache stores: latent (B, 1, S, R) and rotary key (B, 1, S, rotary_width)."""
        latent, rotary_key = self.latent(x).split((self.config.latent_rank, self.config.rotary_width), dim=-1)
        assert context.rotation is not None
        return self.latent_norm(latent)[:, None], context.rotation.rotate(rotary_key[:, None])

    def attend_unfolded(
        self, p: Tensor, r: Tensor, latent: Tensor, rotary_key: Tensor, kernel: AttentionKernel, scoring: Scoring
    ) -> Tensor:
        """Unfold the keys and values of every head and attend to them: (B, N, T, value_width)."""
        unfolded = split_heads(self.unfold(latent[:, 0]), self.config.num_heads)
        k, v = unfolded.split((self.config.plain_width, self.config.value_width), dim=-1)
        k = torch.cat((k, rotary_key.expand(-1, self.config.num_heads, -1, -1)), dim=-1)
        return kernel(torch.cat((p, r), dim=-1), k, v, scoring)

    def attend_absorbed(
        self, p: Tensor, r: Tensor, latent: Tensor, rotary_key: Tensor, kernel: AttentionKernel, scoring: Scoring
    ) -> Tensor:
        """Attend to the latent vectors themselves and unfold the result: (B, N, T, value_width)."""
        unfold = self.unfold.weight.view(self.config.num_heads, -1, self.config.latent_rank)  # (N, plain + value, R)
        to_key, to_value = unfold.split((self.config.plain_width, self.config.value_width), dim=1)
        k = torch.cat((latent, rotary_key), dim=-1)  # one key-value head, as in multi-query attention
        out = kernel(torch.cat((p @ to_key, r), dim=-1), k, latent, scoring)  # (B, N, T, R)
        return out @ to_value.transpose(-2, -1)
