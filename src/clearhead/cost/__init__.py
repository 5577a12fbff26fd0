"""What a model costs before it is paid for: parameters, FLOPs, bytes, memory and time.

    clearhead.cost(clearhead.preset("llama-3.1-8b"), phase="decode", context=8192, device="h200")

    workload     the question                             operations  every matrix product (attention, product)
    parameters   how many, part by part                   memory      weights, activations, cache; what fits
    devices      peaks, and this machine as measured      report      all of it in one answer (tables: printed)
    counter      what PyTorch really runs                 layout      the same without running (running: the steps)
    calibration  kernels to seconds                       measure     predicted beside measured (curves: plotted)
    calibrate    measures (host, …_rates)                 clock       how long something takes
    graphed      a token in a CUDA graph                  predict     a workload to seconds
    parallel     what GPUs send each other                share       a model as one of them holds it

The room is also its own door: Python puts every imported package on its parent under its name, so `clearhead.cost`
is this module as soon as anything in it is imported, and calling it must do what the function does.
"""

import sys
from types import ModuleType
from typing import Any


class Room(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        """See report.cost."""
        from clearhead.cost.report import cost

        return cost(*args, **options)


sys.modules[__name__].__class__ = Room
