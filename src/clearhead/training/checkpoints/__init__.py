"""Save and restore training runs, so that a run that is killed at any moment resumes with the same numbers.

A checkpoint appears on disk completely or not at all, and older ones are deleted only after it was read back.

    run_folder  RunFolder: the lock, the checkpoints of a run, and which of them to keep
    saved       SavedCheckpoint: verify a checkpoint and read its tensors, in full or only the part of one process
    state       the state of optimizers and random generators as named tensors, and back
    files       write, fsync and rename files; the safetensors format
"""

from clearhead.training.checkpoints.run_folder import RunFolder
from clearhead.training.checkpoints.saved import SavedCheckpoint
from clearhead.training.checkpoints.state import (
    capture_random_state,
    flatten_optimizer,
    restore_optimizer,
    restore_random_state,
    restore_weights,
    seed_generators,
)

__all__ = [
    "RunFolder",
    "SavedCheckpoint",
    "capture_random_state",
    "flatten_optimizer",
    "restore_optimizer",
    "restore_random_state",
    "restore_weights",
    "seed_generators",
]
