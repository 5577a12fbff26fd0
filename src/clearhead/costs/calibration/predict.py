"""How long a workload takes on a measured machine.

predict_seconds(workload, load_calibration("cpu"))
"""

from clearhead.costs.calibration.calibration import Calibration
from clearhead.costs.calibration.packed_rates import packed_seconds, runs_packed
from clearhead.costs.formulas.memory import weight_bytes
from clearhead.costs.formulas.workload import Workload
from clearhead.costs.simulation.layout import lay_out


def is_predicted(workload: Workload, calibration: Calibration) -> bool:
    if workload.quant is not None:
        return runs_packed(workload) and bool(calibration.packed.get(workload.quant))
    return workload.gpus == 1 and workload.dtype in calibration.products


def predict_seconds(workload: Workload, calibration: Calibration) -> float:
    """Run as it stands, kernel after kernel; a training step ends with AdamW, all of it in one kernel."""
    if workload.quant is not None:
        return packed_seconds(workload, calibration.packed[workload.quant])
    seconds = calibration.seconds(lay_out(workload), workload.dtype, workload.phase)
    if workload.phase == "train":
        seconds += weight_bytes(workload) / calibration.optimizer[workload.dtype]
    return seconds
