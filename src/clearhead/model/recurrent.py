"""A recurrent encoder-decoder, with or without attention: the baseline before the Transformer (book A4, C4).

    network = RecurrentTranslator(config); logits = network(source, target)       # (B, S), (B, T) -> (B, T, V)

    h_1 → h_2 → … → h_S = s_0 → s_1 → … → s_T
    encode: one state h_j per source token; decode: s_t from s_{t-1}, the token y_t and, with attention, a context c_t

Without attention, s_0 is all that the decoder receives of the source (Sutskever et al. 2014; Cho et al. 2014 pass it to
every step). With attention, the order of computation is that of Bahdanau et al. 2015, §3.1, and the score is `dot` of
Luong et al. 2015, §3.1. Our y_t, the token read at step t, is their y_{t-1}:

    e_tj = s_{t-1} · h_j      a_t = softmax(e_t) over real source tokens      c_t = Σ_j a_tj h_j
    s_t = cell([y_t; c_t], s_{t-1}), which for the tanh cell is tanh(W [s_{t-1}; c_t; y_t] + b)

With several layers, h and s in these formulas are those of the last layer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from clearhead.config import CheckedConfig
from clearhead.errors import ClearheadError, require
from clearhead.model.attend import AttentionSteps, Scoring, attention_steps
from clearhead.model.embedding import check_range
from clearhead.model.masks import cross_attention_mask

CELLS: dict[str, Callable[..., nn.RNNBase]] = {"tanh": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig(CheckedConfig):
    """Config of a RecurrentTranslator. A cell computes the next state s′ from the state s and the input x:

    tanh   s′ = tanh(W x + U s + b)                                               Elman 1990
    gru    r, z = σ(W x + U s + b)      n = tanh(W x + b_ih + r · (U s + b_hh))   Cho et al. 2014, §2.3
           s′ = (1 - z) · n + z · s
    lstm   i, f = σ(W x + U s + b)      g = tanh(W x + U s + b)                   Hochreiter & Schmidhuber 1997;
           o = σ(W x + U s + b)                                                   f is from Gers et al. 2000
           c′ = f · c + i · g           s′ = o · tanh(c′)

    Each gate has its own W, U and b = b_ih + b_hh (torch's weight_ih, weight_hh, bias_ih, bias_hh), which torch stacks
    in the order given here. Cho et al. reset the state before the product with U, torch after it; their h is our s,
    their h̃ our n.
    """

    MAY_BE_ZERO = ("dropout",)

    source_vocab_size: int
    target_vocab_size: int
    embedding_width: int
    width: int  # of the states; in a bidirectional encoder each direction has half of it
    num_layers: int = 1
    cell: Literal["tanh", "gru", "lstm"]
    attention: Literal["dot_product", "none"]
    bidirectional: bool = False  # the encoder; the decoder cannot be
    dropout: float = 0.0  # on every connection except those through time (Zaremba et al. 2014), in training only
    context: int  # longest sequence it was trained for; never a hard limit

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not self.bidirectional or self.width % 2 == 0, f"width is {self.width}; it must be even if bidirectional"
        )
        require(self.dropout < 1, f"dropout is {self.dropout}; it must be less than 1")


@dataclass(frozen=True)
class DecoderState:
    """What the decoder passes from one token to the next."""

    hidden: Tensor  # (L, B, D)
    cell: Tensor | None = None  # (L, B, D), the c of an LSTM

    @staticmethod
    def from_torch(state: Tensor | tuple[Tensor, Tensor]) -> "DecoderState":
        """Return the state that a torch.nn module returned."""
        return DecoderState(*state) if isinstance(state, tuple) else DecoderState(state)

    def to_torch(self) -> Tensor | tuple[Tensor, Tensor]:
        """Return the state in the form that torch.nn modules take."""
        return self.hidden if self.cell is None else (self.hidden, self.cell)

    @property
    def last_layer(self) -> Tensor:
        """Hidden state of the last layer (B, D)."""
        return self.hidden[-1]


@dataclass(frozen=True)
class RecurrentEncoderOutput:
    """Encoder output that the decoder starts from and attends to."""

    states: Tensor  # (B, S, D), 0 at padding
    final: DecoderState  # after the last real token; of the backward direction, after the first
    mask: Tensor | None = None  # (B, S), False for padding; None: no padding


class RecurrentTranslator(nn.Module):
    """Recurrent encoder-decoder. In all masks True or 1 is a real token; padding comes last in each sequence."""

    def __init__(self, config: RecurrentConfig):
        super().__init__()
        self.config = config
        context_width = config.width if config.attention == "dot_product" else 0
        self.source_embedding = nn.Embedding(config.source_vocab_size, config.embedding_width)
        self.target_embedding = nn.Embedding(config.target_vocab_size, config.embedding_width)
        self.encoder = _build_layers(config, config.embedding_width, config.bidirectional)
        self.decoder = _build_layers(config, config.embedding_width + context_width)
        self.head = nn.Linear(config.width, config.target_vocab_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        source_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
    ) -> Tensor:
        """source (B, S), target (B, T) -> logits (B, T, V)."""
        return self.decode(target, self.encode(source, source_mask), target_mask)

    def encode(self, source: Tensor, source_mask: Tensor | None = None) -> RecurrentEncoderOutput:
        """Run the encoder on source (B, S)."""
        _check_inputs("source", source, source_mask, self.config.source_vocab_size)
        x = self.dropout(self.source_embedding(source))
        if source_mask is None:
            states, final = self.encoder(x)
        else:
            num_real = source_mask.bool().sum(dim=1).cpu()
            packed, final = self.encoder(pack_padded_sequence(x, num_real, batch_first=True, enforce_sorted=False))
            states, _ = pad_packed_sequence(packed, batch_first=True, total_length=source.shape[1])
        if self.config.bidirectional:
            final = tuple(map(_concat_directions, final)) if isinstance(final, tuple) else _concat_directions(final)
        return RecurrentEncoderOutput(states, DecoderState.from_torch(final), source_mask)

    def decode(
        self, target: Tensor, encoder_output: RecurrentEncoderOutput, target_mask: Tensor | None = None
    ) -> Tensor:
        """Return logits (B, T, V) with teacher forcing: step t reads target[t], whatever was predicted (book D3)."""
        return self.compute_logits(self.hidden_states(target, encoder_output, target_mask)[:, 1:])

    def attention_weights(
        self, target: Tensor, encoder_output: RecurrentEncoderOutput, target_mask: Tensor | None = None
    ) -> Tensor:
        """Return the attention weights (B, T, S) of each step over the source tokens."""
        if self.config.attention == "none":
            raise ClearheadError("this model has no attention; build it with attention='dot_product'")
        queries = self.hidden_states(target, encoder_output, target_mask)[:, :-1]
        return attend(queries, encoder_output).weights[:, 0]

    def hidden_states(
        self, target: Tensor, encoder_output: RecurrentEncoderOutput, target_mask: Tensor | None = None
    ) -> Tensor:
        """Return the states s_0 … s_T of the last layer (B, T + 1, D).

        Padding comes last in each sequence, so it does not affect the states of real tokens.
        """
        _check_inputs("target", target, target_mask, self.config.target_vocab_size)
        _check_batch_size(target, encoder_output)
        states = [self.initial_state(encoder_output)]
        for tokens in target.unbind(dim=1):
            states.append(self.next_state(tokens, states[-1], encoder_output))
        return torch.stack([state.last_layer for state in states], dim=1)

    def initial_state(self, encoder_output: RecurrentEncoderOutput) -> DecoderState:
        """Return s_0, the final state of the encoder."""
        return encoder_output.final

    def step(
        self, tokens: Tensor, state: DecoderState, encoder_output: RecurrentEncoderOutput
    ) -> tuple[Tensor, DecoderState]:
        """Read one token per sequence (B,) and return the logits for the next (B, V) and the new state."""
        if tokens.ndim != 1:
            raise ClearheadError(f"tokens has shape {tuple(tokens.shape)}; it must be (batch,), one token per sequence")
        _check_inputs("target", tokens[:, None], None, self.config.target_vocab_size)
        _check_batch_size(tokens, encoder_output)
        state = self.next_state(tokens, state, encoder_output)
        return self.compute_logits(state.last_layer), state

    def next_state(self, tokens: Tensor, state: DecoderState, encoder_output: RecurrentEncoderOutput) -> DecoderState:
        """Return s_t from s_{t-1} and the tokens y_t (B,)."""
        x = self.target_embedding(tokens)[:, None]  # (B, 1, embedding width)
        if self.config.attention == "dot_product":
            context = attend(state.last_layer[:, None], encoder_output).output[:, 0]
            x = torch.cat((x, context), dim=-1)  # (B, 1, embedding width + D)
        _, new_state = self.decoder(self.dropout(x), state.to_torch())
        return DecoderState.from_torch(new_state)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Return the logits (..., V) of hidden states (..., D)."""
        return self.head(self.dropout(hidden_states))


def _build_layers(config: RecurrentConfig, input_width: int, bidirectional: bool = False) -> nn.RNNBase:
    """Return the recurrent layers of the encoder or the decoder."""
    return CELLS[config.cell](
        input_width,
        config.width // 2 if bidirectional else config.width,
        num_layers=config.num_layers,
        batch_first=True,
        dropout=config.dropout if config.num_layers > 1 else 0.0,  # between layers; torch warns if there is only one
        bidirectional=bidirectional,
    )


def _concat_directions(final: Tensor) -> Tensor:
    """Join the final states of both directions, which torch stacks alternately: (L · 2, B, D / 2) -> (L, B, D)."""
    return final.unflatten(0, (-1, 2)).transpose(1, 2).flatten(2)


def attend(queries: Tensor, encoder_output: RecurrentEncoderOutput) -> AttentionSteps:
    """Attend from decoder states (B, T, D) to the encoder states, with one head and neither projection nor scale."""
    keys = encoder_output.states[:, None]  # (B, 1, S, D), used as values too
    return attention_steps(
        queries[:, None], keys, keys, Scoring(mask=cross_attention_mask(encoder_output.mask), scale=1.0)
    )


def _check_inputs(name: str, tokens: Tensor, mask: Tensor | None, vocab_size: int) -> None:
    """Raise ClearheadError if tokens or their mask are invalid.

    Token ids are checked on the CPU only, where it costs no synchronization; masks everywhere, since packing the
    sequences reads them anyway.
    """
    if tokens.ndim != 2 or tokens.numel() == 0:
        raise ClearheadError(f"{name} has shape {tuple(tokens.shape)}; it must be (batch, length), and not empty")
    if tokens.dtype not in (torch.int64, torch.int32):
        raise ClearheadError(f"{name} must be int64 or int32, not {tokens.dtype}")
    if tokens.device.type == "cpu":
        check_range(f"{name} token id", tokens, vocab_size)
    if mask is None:
        return
    if mask.shape != tokens.shape:
        raise ClearheadError(
            f"{name}_mask has shape {tuple(mask.shape)}; it must have that of {name}, {tuple(tokens.shape)}"
        )
    real = mask.bool()
    if not real[:, 0].all() or (real[:, 1:] > real[:, :-1]).any():
        raise ClearheadError(f"{name}_mask must have real tokens first and padding last, and no sequence may be empty")


def _check_batch_size(tokens: Tensor, encoder_output: RecurrentEncoderOutput) -> None:
    """Raise ClearheadError unless there is one encoded source per target."""
    num_targets, num_sources = tokens.shape[0], encoder_output.states.shape[0]
    if num_targets != num_sources:
        raise ClearheadError(
            f"there are {num_targets} targets and {num_sources} encoded sources; encode one source for each target"
        )
