"""The workload whose cost is computed: a model, a phase, sizes, precision and GPUs.

    workload = Workload(config=preset("llama-3.1-8b"), phase="decode", context=8192, source=8192)

train     forward and backward over (batch, context) tokens without a cache; the loss multiplies no matrices and is not
          counted
prefill   (batch, context) tokens into an empty cache, and the logits after the last token of each sequence; an
          encoder-decoder encodes the source and computes the keys and values of its cross-attention; an encoder runs
          its forward pass
decode    one token per sequence; afterwards the cache holds `context` tokens, including the new one
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

from clearhead.architecture import AudioEmbedding, LearnedPositions, ModelConfig
from clearhead.costs.formulas.packed_weights import PACKED_BITS, average_bits
from clearhead.costs.formulas.tensor_parallel import shard_config
from clearhead.errors import ClearheadError, require, unknown_name

Phase = Literal["train", "prefill", "decode"]
Parallel = Literal["ddp", "fsdp", "tp"]
Optimizer = Literal["adamw", "sgd"]
DeviceType = Literal["cpu", "cuda"]

_DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

# Values per parameter that an optimizer stores besides the gradient. PyTorch stores them in the parameter's precision.
OPTIMIZER_STATES = {"adamw": 2, "sgd": 0}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is to be costed. All fields are validated on creation."""

    config: ModelConfig
    phase: Phase = "prefill"
    batch: int = 1  # sequences, over all GPUs
    context: int  # tokens per sequence
    source: int  # tokens per source sequence of an encoder-decoder
    dtype: str = "bfloat16"
    weights: str = "full"  # "full": in `dtype`; otherwise a format of PACKED_BITS
    optimizer: Optimizer = "adamw"
    recompute: bool = False  # the backward recomputes each block from its input instead of storing its activations
    device_type: DeviceType = "cuda"
    gpus: int = 1
    parallel: Parallel = "ddp"

    def __post_init__(self) -> None:
        for kind, value, choices in (
            ("phase", self.phase, get_args(Phase)),
            ("dtype", self.dtype, _DTYPE_BYTES),
            ("weights", self.weights, ("full", *PACKED_BITS)),
            ("optimizer", self.optimizer, OPTIMIZER_STATES),
            ("parallel", self.parallel, get_args(Parallel)),
        ):
            if value is not None and value not in choices:
                raise unknown_name(kind, str(value), choices)
        for name in ("batch", "context", "source", "gpus"):
            value = getattr(self, name)
            require(value >= 1, f"{name} is {value}; it must be 1 or more")
        self._check_phase()
        self._check_positions()
        self._check_gpus()

    def _check_phase(self) -> None:
        if self.phase == "decode" and self.config.decoder is None:
            raise ClearheadError("phase 'decode' needs a decoder; for this encoder use phase 'prefill' or 'train'")
        if self.phase == "train" and self.is_packed:
            raise ClearheadError(
                f"weights {self.weights!r} are for inference; leave them out, since training uses {self.dtype} weights"
            )
        if self.phase != "train" and self.recompute:
            raise ClearheadError(f"recompute has no effect in phase {self.phase!r}; leave it out or use phase 'train'")

    def _check_positions(self) -> None:
        config = self.config
        for name, stack, length in (
            ("source", config.encoder if config.is_encoder_decoder else None, self.source),
            ("context", config.output_stack, self.context),
        ):
            if stack is not None and isinstance(stack.embedding, AudioEmbedding):
                required = stack.embedding.num_positions
                require(length == required, f"source is {length}; this model reads audio as {required} vectors, always")
                continue
            positions = stack.token_embedding.positions if stack else None
            if isinstance(positions, LearnedPositions) and length > positions.num_positions:
                raise ClearheadError(
                    f"{name} {length} exceeds the {positions.num_positions} learned positions of this model; "
                    f"use {positions.num_positions} or fewer"
                )

    def _check_gpus(self) -> None:
        if self.parallel == "tp":
            shard_config(self.config, self.gpus)  # raises if heads or columns do not divide
        elif self.batch % self.gpus:
            raise ClearheadError(
                f"{self.parallel} cannot divide a batch of {self.batch} sequences among {self.gpus} GPUs; "
                f"use a batch that is a multiple of {self.gpus}"
            )

    @property
    def bytes_per_activation(self) -> int:
        """Bytes of one activation, and of one cached key or value."""
        return _DTYPE_BYTES[self.dtype]

    @property
    def is_packed(self) -> bool:
        """Whether the weights are quantized."""
        return self.weights != "full"

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of one weight, with its part of the scale and offset of a quantized block; in int4 an average."""
        return self._packed_bits / 8 if self.is_packed else self.bytes_per_activation

    @property
    def _packed_bits(self) -> float:
        return average_bits(self.config, self.weights, self.device_type)

    @cached_property
    def per_gpu(self) -> "Workload":
        """The workload of one GPU: its part of the model on all sequences (tp), or the whole model on its part."""
        if self.gpus == 1:
            return self
        if self.parallel == "tp":
            return replace(self, config=shard_config(self.config, self.gpus), gpus=1)
        return replace(self, batch=self.batch // self.gpus, gpus=1)

    @property
    def encodes_source(self) -> bool:
        """Whether only the encoder runs: the prefill of an encoder-decoder, before the decoder has any tokens."""
        return self.phase == "prefill" and self.config.is_encoder_decoder

    @property
    def num_logit_positions(self) -> int:
        """Number of hidden states that become logits: all in training and in an encoder, else one per sequence."""
        config = self.config
        if config.head is None or self.encodes_source:
            return 0
        return self.batch * (self.context if self.phase == "train" or config.decoder is None else 1)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that one run processes, over all GPUs."""
        return self.batch * (1 if self.phase == "decode" else self.source if self.encodes_source else self.context)


def default_context(config: ModelConfig) -> int:
    """Return the context to assume: the one that the model was designed for, at most its learned positions."""
    positions = config.output_stack.token_embedding.positions
    num_learned = positions.num_positions if isinstance(positions, LearnedPositions) else config.context
    return min(config.context, num_learned)


def default_source(config: ModelConfig, context: int) -> int:
    """Return the length of the source to assume: `context`, or that of the audio that the encoder reads."""
    embedding = None if config.encoder is None else config.encoder.embedding
    return embedding.num_positions if isinstance(embedding, AudioEmbedding) else context
