"""The baseline before the Transformer: a recurrent encoder-decoder, without attention or with (book A4, C4).

    network = RecurrentTranslator(config); logits = network(source, target)       # (B, S), (B, T) -> (B, T, V)

    h_1 → h_2 → … → h_S = s_0 → s_1 → … → s_T
    encode: one state per source token; decode: s_t from s_{t-1}, the token y_t and, with attention, a context c_t

s_0 is the bottleneck: without attention it is all that the decoder learns of the source (Sutskever et al. 2014;
Cho et al. 2014 hand it to every step). With attention the order is that of Bahdanau et al. 2015, §3.1, the score
`dot` of Luong et al. 2015, §3.1; our y_t, the token read at step t, is their y_{t-1}:

    e_tj = s_{t-1} · h_j      a_t = softmax(e_t) over real source tokens      c_t = Σ_j a_tj h_j
    s_t = cell([y_t; c_t], s_{t-1}), which for the tanh cell is tanh(W [s_{t-1}; c_t; y_t] + b)

Of several layers, h and s in these lines are the last one's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from clearhead.config import Checked
from clearhead.errors import ClearheadError, require
from clearhead.model.attend import AttentionSteps, Scoring, attention_steps
from clearhead.model.embedding import check_range
from clearhead.model.masks import cross_attention_mask

CELLS: dict[str, Callable[..., nn.RNNBase]] = {"tanh": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig(Checked):
    """One step from state s to s′ under the input x; torch stacks the gates in the order given here.

    tanh   s′ = tanh(W x + U s + b)                                               Elman 1990
    gru    r, z = σ(W x + U s + b)      n = tanh(W x + b_ih + r · (U s + b_hh))   Cho et al. 2014, §2.3
           s′ = (1 - z) · n + z · s
    lstm   i, f = σ(W x + U s + b)      g = tanh(W x + U s + b)                   Hochreiter & Schmidhuber 1997;
           o = σ(W x + U s + b)                                                   f is from Gers et al. 2000
           c′ = f · c + i · g           s′ = o · tanh(c′)

    Each gate has its own W, U and b = b_ih + b_hh (torch's weight_ih, weight_hh, bias_ih, bias_hh). Cho et al. reset
    the state before U, torch after it; their h is our s, their h̃ our n.
    """

    MAY_BE_ZERO = ("dropout",)

    source_vocab_size: int
    target_vocab_size: int
    embedding_width: int
    width: int  # of the states; a bidirectional encoder gives half of it to each direction
    num_layers: int = 1
    cell: Literal["tanh", "gru", "lstm"]
    attention: Literal["dot_product", "none"]
    bidirectional: bool = False  # the encoder; the decoder cannot be
    dropout: float = 0.0  # on every connection but those through time (Zaremba et al. 2014), in training only
    context: int  # longest sequence it was made for; never a hard limit

    def __post_init__(self) -> None:
        super().__post_init__()
        require(not self.bidirectional or self.width % 2 == 0, f"width {self.width} must be even to be bidirectional")
        require(self.dropout < 1, f"dropout is {self.dropout}; it must be below 1")


@dataclass(frozen=True)
class State:
    """What the decoder carries from one token to the next."""

    hidden: Tensor  # (L, B, D)
    cell: Tensor | None = None  # (L, B, D), the c of an LSTM

    @staticmethod
    def of(parts: Tensor | tuple[Tensor, Tensor]) -> "State":
        return State(*parts) if isinstance(parts, tuple) else State(parts)

    @property
    def parts(self) -> Tensor | tuple[Tensor, Tensor]:
        """As torch.nn takes and gives it."""
        return self.hidden if self.cell is None else (self.hidden, self.cell)

    @property
    def top(self) -> Tensor:
        """The last layer's (B, D)."""
        return self.hidden[-1]


@dataclass(frozen=True)
class RecurrentEncoderOutput:
    """What the encoder leaves for the decoder."""

    states: Tensor  # (B, S, D), 0 where padded
    final: State  # after the last real token; backward, after the first
    mask: Tensor | None = None  # (B, S), None: no padding


class RecurrentTranslator(nn.Module):
    def __init__(self, config: RecurrentConfig):
        super().__init__()
        self.config = config
        context_width = config.width if config.attention == "dot_product" else 0
        self.source_embedding = nn.Embedding(config.source_vocab_size, config.embedding_width)
        self.target_embedding = nn.Embedding(config.target_vocab_size, config.embedding_width)
        self.encoder = build_layers(config, config.embedding_width, config.bidirectional)
        self.decoder = build_layers(config, config.embedding_width + context_width)
        self.head = nn.Linear(config.width, config.target_vocab_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        source_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
    ) -> Tensor:
        """source (B, S), target (B, T) -> logits (B, T, V). True or 1 in a mask: a real token, none after padding."""
        return self.decode(target, self.encode(source, source_mask), target_mask)

    def encode(self, source: Tensor, source_mask: Tensor | None = None) -> RecurrentEncoderOutput:
        check_tokens("source", source, source_mask, self.config.source_vocab_size)
        x = self.dropout(self.source_embedding(source))
        if source_mask is None:
            states, final = self.encoder(x)
        else:
            num_real = source_mask.bool().sum(dim=1).cpu()
            packed, final = self.encoder(pack_padded_sequence(x, num_real, batch_first=True, enforce_sorted=False))
            states, _ = pad_packed_sequence(packed, batch_first=True, total_length=source.shape[1])
        if self.config.bidirectional:
            final = tuple(map(side_by_side, final)) if isinstance(final, tuple) else side_by_side(final)
        return RecurrentEncoderOutput(states, State.of(final), source_mask)

    def decode(self, target: Tensor, encoder_output: RecurrentEncoderOutput, target_mask: Tensor | None = None) -> Tensor:
        """Teacher forcing: at each t the token given is target[t], whatever the logits said before (book D3)."""
        return self.to_logits(self.hidden_states(target, encoder_output, target_mask)[:, 1:])

    def align(self, target: Tensor, encoder_output: RecurrentEncoderOutput, target_mask: Tensor | None = None) -> Tensor:
        """Attention weights (B, T, S): where in the source the step that reads target[t] looks."""
        if self.config.attention == "none":
            raise ClearheadError("this model has no attention to show; make it with attention 'dot_product'")
        return look(self.hidden_states(target, encoder_output, target_mask)[:, :-1], encoder_output).weights[:, 0]

    def hidden_states(
        self, target: Tensor, encoder_output: RecurrentEncoderOutput, target_mask: Tensor | None = None
    ) -> Tensor:
        """The last layer's s_0 … s_T (B, T + 1, D). Padding comes last in a row, so no real token feels it."""
        check_tokens("target", target, target_mask, self.config.target_vocab_size)
        check_rows(target, encoder_output)
        states = [self.start(encoder_output)]
        for tokens in target.unbind(dim=1):
            states.append(self.advance(tokens, states[-1], encoder_output))
        return torch.stack([state.top for state in states], dim=1)

    def start(self, encoder_output: RecurrentEncoderOutput) -> State:
        return encoder_output.final

    def step(self, tokens: Tensor, state: State, encoder_output: RecurrentEncoderOutput) -> tuple[Tensor, State]:
        """One token of each row (B,) -> logits for the next (B, V), and the state to hand to the next step."""
        if tokens.ndim != 1:
            raise ClearheadError(f"a step takes one token per row, (batch,), not {tuple(tokens.shape)}")
        check_tokens("target", tokens[:, None], None, self.config.target_vocab_size)
        check_rows(tokens, encoder_output)
        state = self.advance(tokens, state, encoder_output)
        return self.to_logits(state.top), state

    def advance(self, tokens: Tensor, state: State, encoder_output: RecurrentEncoderOutput) -> State:
        """s_{t-1} -> s_t; tokens (B,)."""
        x = self.target_embedding(tokens)[:, None]  # (B, 1, embedding width)
        if self.config.attention == "dot_product":
            attended = look(state.top[:, None], encoder_output)
            x = torch.cat((x, attended.output[:, 0]), dim=-1)  # (B, 1, embedding width + D)
        _, parts = self.decoder(self.dropout(x), state.parts)
        return State.of(parts)

    def to_logits(self, hidden: Tensor) -> Tensor:
        return self.head(self.dropout(hidden))


def build_layers(config: RecurrentConfig, input_width: int, bidirectional: bool = False) -> nn.RNNBase:
    return CELLS[config.cell](
        input_width,
        config.width // 2 if bidirectional else config.width,
        num_layers=config.num_layers,
        batch_first=True,
        dropout=config.dropout if config.num_layers > 1 else 0.0,  # between layers; torch warns where there is none
        bidirectional=bidirectional,
    )


def side_by_side(final: Tensor) -> Tensor:
    """Final states of both directions, alternating as torch stacks them: (L · 2, B, D / 2) -> (L, B, D)."""
    return final.unflatten(0, (-1, 2)).transpose(1, 2).flatten(2)


def look(queries: Tensor, encoder_output: RecurrentEncoderOutput) -> AttentionSteps:
    """Decoder states (B, T, D) look at the encoder's with one head; there is no projection and no scale."""
    keys = encoder_output.states[:, None]  # (B, 1, S, D), the values too
    return attention_steps(
        queries[:, None], keys, keys, Scoring(mask=cross_attention_mask(encoder_output.mask), scale=1.0)
    )


def check_tokens(name: str, tokens: Tensor, mask: Tensor | None, vocab_size: int) -> None:
    """Ids are looked at on the CPU only, where it costs nothing; masks everywhere, since packing reads them anyway."""
    if tokens.ndim != 2 or tokens.numel() == 0:
        raise ClearheadError(f"{name} must be (batch, length) and not empty, not {tuple(tokens.shape)}")
    if tokens.dtype not in (torch.int64, torch.int32):
        raise ClearheadError(f"{name} must be whole numbers (int64 or int32), not {tokens.dtype}")
    if tokens.device.type == "cpu":
        check_range(f"{name} token id", tokens, vocab_size)
    if mask is None:
        return
    if mask.shape != tokens.shape:
        raise ClearheadError(f"{name}_mask is {tuple(mask.shape)}; it must be {tuple(tokens.shape)} as {name} is")
    real = mask.bool()
    if not real[:, 0].all() or (real[:, 1:] > real[:, :-1]).any():
        raise ClearheadError(f"{name}_mask must have real tokens first and padding last in each row, and no empty row")


def check_rows(tokens: Tensor, encoder_output: RecurrentEncoderOutput) -> None:
    rows, memory_rows = tokens.shape[0], encoder_output.states.shape[0]
    if rows != memory_rows:
        raise ClearheadError(f"target has {rows} rows and memory {memory_rows}; encode one source for each target")
