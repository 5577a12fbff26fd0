"""Multi-head latent attention (DeepSeek-V2, §2.1): keys and values unfolded from one small vector per token.

    latent c = norm(W_down x) (B, 1, S, R)    rotary key r = rotate(W_rot x) (B, 1, S, H_r), one for all heads
    plain:     k_n = [U_n c | r],  v_n = V_n c            q_n = [p_n | rotate(r_n)]
    absorbed:  q_n = [U_nᵀ p_n | rotate(r_n)] against [c | r], then V_n on the result

Both give the same output: p·(U c) = (Uᵀp)·c. Absorbed, all heads share one key and one value of width R, so a
cache holds R + H_r numbers per token. Our p, r are the paper's q^C, q^R; `unfold` is W^UK and W^UV together.
"""

import torch
from torch import Tensor, nn

from clearhead.architecture import LatentAttention, RmsNorm
from clearhead.model.attend import AttentionKernel, Scoring
from clearhead.model.attention import merge_heads, split_heads
from clearhead.model.context import AttentionContext
from clearhead.model.norms import build_norm


class LatentAttentionLayer(nn.Module):
    def __init__(self, config: LatentAttention, width: int, dropout: float = 0.0):
        super().__init__()
        self.config, self.dropout = config, dropout
        heads, plain, rotary, value = (
            config.num_heads,
            config.plain_width,
            config.rotary_width,
            config.value_width,
        )
        norm = RmsNorm(epsilon=config.latent_epsilon)
        self.scale = (plain + rotary) ** -0.5 if config.scale is None else config.scale
        if config.query_rank is None:
            self.query = nn.Linear(width, heads * (plain + rotary), bias=False)
        else:
            self.query_down = nn.Linear(width, config.query_rank, bias=False)
            self.query_norm = build_norm(norm, config.query_rank)
            self.query_up = nn.Linear(config.query_rank, heads * (plain + rotary), bias=False)
        self.latent = nn.Linear(width, config.latent_rank + rotary, bias=False)
        self.latent_norm = build_norm(norm, config.latent_rank)
        self.unfold = nn.Linear(config.latent_rank, heads * (plain + value), bias=False)
        self.output = nn.Linear(heads * value, width, bias=False)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """x (B, T, D) -> (B, T, D)."""
        plain, rotary = self.queries(x, context)
        latent, rotary_key = self.compress(x, context)
        if context.keep is not None:
            latent, rotary_key = context.keep(latent, rotary_key)
        attend = self.absorbed if context.absorb else self.plain
        how = Scoring(mask=context.mask, scale=self.scale, dropout=self.dropout if self.training else 0.0)
        return self.output(merge_heads(attend(plain, rotary, latent, rotary_key, context.kernel, how)))

    def queries(self, x: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:
        """(B, N, T, plain) and (B, N, T, rotary), the second turned."""
        if self.config.query_rank is None:
            q = self.query(x)
        else:
            q = self.query_up(self.query_norm(self.query_down(x)))
        q = split_heads(q, self.config.num_heads)
        plain, rotary = q.split((self.config.plain_width, self.config.rotary_width), dim=-1)
        assert context.rotation is not None
        return plain, context.rotation.rotate(rotary)

    def compress(self, x: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:
        """All that later tokens need of this one: latent (B, 1, S, R), rotary key (B, 1, S, rotary)."""
        latent, rotary_key = self.latent(x).split((self.config.latent_rank, self.config.rotary_width), dim=-1)
        assert context.rotation is not None
        return self.latent_norm(latent)[:, None], context.rotation.rotate(rotary_key[:, None])

    def plain(
        self, p: Tensor, r: Tensor, latent: Tensor, rotary_key: Tensor, kernel: AttentionKernel, how: Scoring
    ) -> Tensor:
        unfolded = split_heads(self.unfold(latent[:, 0]), self.config.num_heads)
        k, v = unfolded.split((self.config.plain_width, self.config.value_width), dim=-1)
        k = torch.cat((k, rotary_key.expand(-1, self.config.num_heads, -1, -1)), dim=-1)
        return kernel(torch.cat((p, r), dim=-1), k, v, how)

    def absorbed(
        self, p: Tensor, r: Tensor, latent: Tensor, rotary_key: Tensor, kernel: AttentionKernel, how: Scoring
    ) -> Tensor:
        unfold = self.unfold.weight.view(self.config.num_heads, -1, self.config.latent_rank)  # (N, plain + value, R)
        to_key, to_value = unfold.split((self.config.plain_width, self.config.value_width), dim=1)
        key = torch.cat((latent, rotary_key), dim=-1)  # one key-value head, as in multi-query attention
        out = kernel(torch.cat((p @ to_key, r), dim=-1), key, latent, how)  # (B, N, T, R)
        return out @ to_value.transpose(-2, -1)
