"""What is to be run, in numbers: the question that the rest of this room answers.

Workload(config=preset("llama-3.1-8b"), phase="decode", context=8192, source=8192)

train     forward and backward over (batch, context) tokens, no cache; the loss is not counted, it multiplies no matrix
prefill   (batch, context) tokens into an empty cache, logits after the last of each row; an encoder-decoder encodes
          the source and makes the keys and values of its cross-attention, an encoder alone reads
decode    one token for each row; `context` tokens are held once it is, itself included
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

from clearhead.architecture import LearnedPositions, ModelConfig
from clearhead.costs.formulas.tensor_parallel_sizes import share_of
from clearhead.errors import ClearheadError, require, unknown_name

Phase = Literal["train", "prefill", "decode"]
Parallel = Literal["ddp", "fsdp", "tp"]
Optimizer = Literal["adamw", "sgd"]

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

# Bits for each weight of a matrix: blocks of 32 share a scale of 16 bits, those of int4 and q4_1 an offset too
# (int…: backends/packed/formats.py; q…: the blocks of GGUF).
QUANT_BITS = {"int8": 8.5, "int4": 5.0, "q4_0": 4.5, "q4_1": 5.0, "q8_0": 8.5}

# Numbers kept for each parameter beside its gradient; torch keeps them in the parameter's own precision.
OPTIMIZER_NUMBERS = {"adamw": 2, "sgd": 0}


@dataclass(frozen=True, kw_only=True)
class Workload:
    config: ModelConfig
    phase: Phase = "prefill"
    batch: int = 1
    context: int
    source: int  # tokens of the encoder's side, where there are two
    dtype: str = "bfloat16"
    quant: str | None = None
    optimizer: Optimizer = "adamw"
    recompute: bool = False  # training runs every block's forward again instead of keeping what is inside
    device_type: Literal["cpu", "cuda"] = "cuda"
    gpus: int = 1
    parallel: Parallel = "ddp"

    def __post_init__(self) -> None:
        for kind, value, choices in (
            ("phase", self.phase, get_args(Phase)),
            ("dtype", self.dtype, DTYPE_BYTES),
            ("quant", self.quant, QUANT_BITS),
            ("optimizer", self.optimizer, OPTIMIZER_NUMBERS),
            ("parallel", self.parallel, get_args(Parallel)),
        ):
            if value is not None and value not in choices:
                raise unknown_name(kind, str(value), choices)
        for name in ("batch", "context", "source", "gpus"):
            value = getattr(self, name)
            require(value >= 1, f"{name} is {value}; it must be 1 or more")
        self.check_fit()

    def check_fit(self) -> None:
        config = self.config
        if self.phase == "decode" and config.decoder is None:
            raise ClearheadError("an encoder alone decodes nothing; ask for phase 'prefill' or 'train'")
        if self.phase == "train" and self.quant is not None:
            raise ClearheadError(f"quant {self.quant!r} is for running; weights are trained in {self.dtype}")
        if self.phase != "train" and self.recompute:
            raise ClearheadError(f"recompute has no effect on {self.phase}; leave it out, or ask for phase 'train'")
        for name, stack, length in (
            ("source", config.encoder if config.is_encoder_decoder else None, self.source),
            ("context", config.output_stack, self.context),
        ):
            positions = stack.embedding.positions if stack else None
            if isinstance(positions, LearnedPositions) and length > positions.num_positions:
                raise ClearheadError(
                    f"{name} {length} is beyond the {positions.num_positions} positions this model has learned; "
                    f"ask for {positions.num_positions} or fewer"
                )
        if self.parallel == "tp":
            share_of(config, self.gpus)  # says what does not divide
        else:
            require(
                self.batch % self.gpus == 0,
                f"{self.parallel} shares the batch: {self.batch} rows do not divide among {self.gpus} GPUs",
            )

    @property
    def num_bytes(self) -> int:
        """Of one activation."""
        return DTYPE_BYTES[self.dtype]

    @property
    def weight_bytes(self) -> float:
        """Of one weight of a matrix."""
        return self.num_bytes if self.quant is None else QUANT_BITS[self.quant] / 8

    @cached_property
    def of_one_gpu(self) -> "Workload":
        """What each of them computes: all rows with its share of the model, or its rows with the whole."""
        if self.gpus == 1:
            return self
        if self.parallel == "tp":
            return replace(self, config=share_of(self.config, self.gpus), gpus=1)
        return replace(self, batch=self.batch // self.gpus, gpus=1)

    @property
    def reads_source(self) -> bool:
        """The prefill of an encoder-decoder is its encoder's; the decoder has read nothing yet."""
        return self.phase == "prefill" and self.config.is_encoder_decoder

    @property
    def logit_rows(self) -> int:
        """Hidden states that are turned into logits: all in training and of an encoder, otherwise a row's last."""
        config = self.config
        if config.head is None or self.reads_source:
            return 0
        return self.batch * (self.context if self.phase == "train" or config.decoder is None else 1)

    @property
    def tokens(self) -> int:
        """That come out of one run, on all GPUs."""
        return self.batch * (1 if self.phase == "decode" else self.source if self.reads_source else self.context)


def longest_context(config: ModelConfig) -> int:
    """What `context` is where nobody says: what the model was made for, within learned positions."""
    positions = config.output_stack.embedding.positions
    learned = positions.num_positions if isinstance(positions, LearnedPositions) else config.context
    return min(config.context, learned)
