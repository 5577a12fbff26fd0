"""How long a workload takes on a measured machine.

predict_seconds(workload, load_calibration("cpu"))
"""

from clearhead.cost.calibration import Calibration
from clearhead.cost.layout import lay_out
from clearhead.cost.memory import weight_bytes
from clearhead.cost.workload import Workload

ADAMW_MOVES = 7  # reads weight, gradient and two moments, writes all but the gradient


def predict_seconds(workload: Workload, calibration: Calibration) -> float:
    """Run as it stands, kernel after kernel; a training step ends with AdamW, all of it in one kernel."""
    laid_out = lay_out(workload)
    seconds = calibration.seconds(laid_out.kernels, laid_out.num_dispatches, workload.dtype, workload.phase)
    if workload.phase == "train":
        seconds += ADAMW_MOVES * weight_bytes(workload) / calibration.bytes_per_second
    return seconds
