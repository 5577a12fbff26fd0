"""Describe how to train: the [train] table of a recipe.

TrainConfig(steps=5000, batch_size=64, optimizer=AdamW(learning_rate=1e-3), schedule=Cosine(warmup_steps=100))
"""

from dataclasses import dataclass, field
from typing import Literal

from clearhead.config import CheckedConfig
from clearhead.errors import require
from clearhead.training.balance import BalanceBias, BalanceLoss
from clearhead.training.optimizer import AdamW, Muon
from clearhead.training.schedule import Constant, Cosine, Linear, Noam, WarmupStableDecay, check_schedule

_MAX_WORKERS = 256  # each worker is a process
_MAX_BATCH_SIZE = 2**20  # the largest published batches have 2**16 rows


@dataclass(frozen=True, kw_only=True)
class TrainConfig(CheckedConfig):
    """All settings of the training loop."""

    MAY_BE_ZERO = ("clip", "num_workers", "seed", "smoothing", "z_weight")
    MAY_BE_LARGE = ("seed",)

    steps: int  # steps of the optimizer
    batch_size: int  # rows of one step, over all processes
    accumulation: int = 1  # parts in which a process computes its rows; results depend on it only with balance_loss
    optimizer: AdamW | Muon = field(default_factory=AdamW)
    schedule: Constant | Linear | Cosine | WarmupStableDecay | Noam = field(default_factory=Cosine)
    clip: float = 1.0  # maximum norm of the gradient over all weights; 0: do not clip
    smoothing: float = 0.0  # label smoothing
    z_weight: float = 0.0  # weight of the z-loss; 1e-4 in PaLM
    balance: BalanceLoss | BalanceBias | None = None  # how the experts of a mixture are balanced
    average: float | None = None  # validate and save a moving average: old · average + new · (1 - average) at each step
    keep: Literal["last", "best"] = "last"  # weights to save: the last, or those with the lowest validation loss
    precision: Literal["float32", "bfloat16", "auto"] = "float32"  # for computations; weights stay in float32
    compile: bool = False  # use torch.compile
    chunk_tokens: int | None = None  # compute logits for this many tokens at a time; none: for all
    checkpoint_activations: bool = False  # recompute each block in the backward pass
    strategy: Literal["ddp", "fsdp", "tp"] = "ddp"  # how processes that torchrun starts divide the work
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    num_workers: int = 0  # processes that load batches
    seed: int = 0  # seed of the weights, the order of the data and dropout
    log_every: int = 10  # steps between two lines of the log
    validate_every: int = 250  # steps between two validations
    validate_batches: int = 20  # batches of one validation
    save_every: int = 500  # steps between two checkpoints
    tracker: Literal["none", "tensorboard", "wandb", "trackio"] = "none"  # where to log, besides metrics.jsonl
    project: str = "clearhead"  # name of the project in the tracker
    samples: tuple[str, ...] = ()  # prompts from which the trained model generates sample.txt

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.batch_size <= _MAX_BATCH_SIZE,
            f"train.batch_size is {self.batch_size}; it must be at most {_MAX_BATCH_SIZE}",
        )
        require(self.smoothing < 1, f"train.smoothing is {self.smoothing}; it must be below 1")
        require(self.average is None or self.average < 1, f"train.average is {self.average}; it must be below 1")
        require(
            self.batch_size % self.accumulation == 0,
            f"train.batch_size is {self.batch_size}; it must be a multiple of train.accumulation, {self.accumulation}",
        )
        require(
            self.strategy != "tp" or not isinstance(self.optimizer, Muon),
            "Muon needs complete matrices, but strategy 'tp' shards them; use adam_w, or strategy 'ddp' or 'fsdp'",
        )
        require(
            self.num_workers <= _MAX_WORKERS,
            f"train.num_workers is {self.num_workers}; it must be at most {_MAX_WORKERS}",
        )
        check_schedule(self.schedule, self.steps)

    def is_due(self, step: int, every: int) -> bool:
        """Return whether work that is done every `every` steps and after the last one is due after `step` steps."""
        return step % every == 0 or step == self.steps
