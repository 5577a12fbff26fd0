"""How to train, as data: the [train] table of a recipe.

TrainConfig(steps=5000, batch_size=64, optimizer=AdamW(learning_rate=1e-3), schedule=Cosine(warmup_steps=100))
"""

from dataclasses import dataclass, field
from typing import Literal

from clearhead.config import Checked
from clearhead.errors import require
from clearhead.training.balance import BalanceBias, BalanceLoss
from clearhead.training.optimizer import AdamW, Muon
from clearhead.training.schedule import Constant, Cosine, Linear, Noam, WarmupStableDecay, check

MOST_WORKERS = 256  # each is a process


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Checked):
    MAY_BE_ZERO = ("clip", "num_workers", "seed", "smoothing", "z_weight")

    steps: int
    batch_size: int  # rows of one update, over all ranks
    accumulation: int = 1  # parts that a rank reads its rows in, one after the other; only balance_loss tells
    optimizer: AdamW | Muon = field(default_factory=AdamW)
    schedule: Constant | Linear | Cosine | WarmupStableDecay | Noam = field(default_factory=Cosine)
    clip: float = 1.0  # longest gradient, as one vector over all weights; 0: of any length
    smoothing: float = 0.0  # of the labels
    z_weight: float = 0.0  # 1e-4 in PaLM
    balance: BalanceLoss | BalanceBias | None = None  # of experts
    average: float | None = None  # what is kept and saved is an average: old · average + new · (1 - average) each step
    keep: Literal["last", "best"] = "last"  # best: the weights of the lowest validation loss
    precision: Literal["float32", "bfloat16", "auto"] = "float32"  # of the computation; weights are float32
    compile: bool = False
    chunk_tokens: int | None = None  # the loss looks at this many tokens at a time; None: at all
    checkpoint_activations: bool = False
    strategy: Literal["ddp", "fsdp", "tp"] = "ddp"  # under torchrun
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    num_workers: int = 0
    seed: int = 0
    log_every: int = 10
    validate_every: int = 250
    validate_batches: int = 20
    save_every: int = 500
    tensorboard: bool = False
    samples: tuple[str, ...] = ()  # prompts that the trained model answers in sample.txt

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.smoothing < 1, f"train.smoothing is {self.smoothing}; it must be below 1")
        require(self.average is None or self.average < 1, f"train.average is {self.average}; it must be below 1")
        require(
            self.batch_size % self.accumulation == 0,
            f"train.batch_size {self.batch_size} does not divide into {self.accumulation} parts of accumulation",
        )
        require(
            self.strategy != "tp" or not isinstance(self.optimizer, Muon),
            "Muon looks at whole matrices, of which strategy 'tp' leaves a process a slice; take adam_w, ddp or fsdp",
        )
        require(self.num_workers <= MOST_WORKERS, f"train.num_workers is {self.num_workers}; {MOST_WORKERS} at most")
        check(self.schedule, self.steps)
