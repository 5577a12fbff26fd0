"""Predict how long a workload takes on a machine that has been measured.

seconds = predict_seconds(workload, load_calibration("cpu"))
"""

from clearhead.architecture import Experts
from clearhead.backends import unsupported_reason
from clearhead.costs.calibration.rates import Calibration
from clearhead.costs.calibration.toy_networks import PACKED_FORMATS
from clearhead.costs.formulas import Workload, cache_bytes, weight_bytes
from clearhead.costs.simulation import simulate


def can_predict(workload: Workload, calibration: Calibration) -> bool:
    """Return whether the calibration covers this workload."""
    if workload.is_packed:
        return uses_packed_kernels(workload) and bool(calibration.packed.get(workload.weights))
    return workload.gpus == 1 and workload.dtype in calibration.products


def predict_seconds(workload: Workload, calibration: Calibration) -> float:
    """Return the seconds of one step as PyTorch runs it, kernel by kernel.

    A training step ends with AdamW, which is one kernel.
    """
    if workload.is_packed:
        return _packed_seconds(workload, calibration.packed[workload.weights])
    seconds = calibration.run_time(simulate(workload), workload.dtype, workload.phase)
    if workload.phase == "train":
        seconds += weight_bytes(workload) / calibration.optimizer[workload.dtype]
    return seconds


def uses_packed_kernels(workload: Workload) -> bool:
    """Return whether generation decodes this workload, one sequence at a time, in our CPU kernels for packed weights.

    Only this case is calibrated, and only for dense models: of a mixture, a token reads just a few experts.
    """
    config = workload.config
    is_packed = workload.device_type == "cpu" and workload.weights in PACKED_FORMATS
    if workload.phase != "decode" or not is_packed or not workload.batch == workload.gpus == 1:
        return False
    if config.decoder is None or any(isinstance(layer.feed_forward, Experts) for layer in config.decoder.layers):
        return False
    return not config.is_encoder_decoder and unsupported_reason(config, "cpu") is None


def _packed_seconds(workload: Workload, rates: dict[str, float]) -> float:
    assert workload.config.decoder is not None
    return (
        weight_bytes(workload) / rates["weight_bytes_per_second"]
        + len(workload.config.decoder.layers) * rates["layer_seconds"]
        + cache_bytes(workload) / rates["cache_bytes_per_second"]
    )
