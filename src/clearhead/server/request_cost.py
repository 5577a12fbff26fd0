"""The account of one request for the page: FLOPs, bytes, memory and time of its prompt and of its new tokens.

    cost_data(model, num_prompt_tokens=64, num_new_tokens=128)["decode"]["flops"]

The numbers are those of `clearhead.cost`. FLOPs and bytes of a decode step grow linearly with the context, so that the
new tokens together take those of the step in the middle, times their number.
"""

from typing import Any

from clearhead.api import Model, cost
from clearhead.backends import PackedMatrix, PackedWeight
from clearhead.costs import Report
from clearhead.errors import ClearheadError, require

_MAX_TOKENS = 10_000_000


def cost_data(model: Model, num_prompt_tokens: int, num_new_tokens: int) -> dict[str, Any]:
    """Return the cost of reading a prompt, and of generating tokens after it; null for a part that does not run."""
    total = num_prompt_tokens + num_new_tokens
    require(num_prompt_tokens >= 1, f"num_prompt_tokens is {num_prompt_tokens}; it must be 1 or more")
    require(
        num_new_tokens >= 0 and total <= _MAX_TOKENS,
        f"num_new_tokens is {num_new_tokens}; it must be from 0 to {_MAX_TOKENS:,}",
    )
    options: dict[str, Any] = {"dtype": str(model.dtype).removeprefix("torch."), "weights": _weights_format(model)}
    device, note = model.device.type, None
    try:
        cost(model.config, phase="prefill", context=1, device=device, **options)
        options["device"] = device
    except ClearheadError as error:
        note = str(error)
    source = num_prompt_tokens if model.config.is_encoder_decoder else None
    prompt = cost(model.config, phase="prefill", context=num_prompt_tokens, source=source, **options)
    step = None
    if num_new_tokens and model.config.decoder is not None:
        middle = num_new_tokens // 2 + (0 if source else num_prompt_tokens)
        step = cost(model.config, phase="decode", context=max(middle, 1), source=source, **options)
    return {
        "parameters": prompt.total_parameters,
        "active_parameters": prompt.active_parameters,
        "dtype": options["dtype"] if options["weights"] == "full" else options["weights"],
        "device": options.get("device"),
        "note": note,
        "cache_bytes_per_token": prompt.cache_bytes_per_token,
        "cache_bytes": prompt.cache_bytes_per_token * total,
        "num_prompt_tokens": num_prompt_tokens,
        "num_new_tokens": num_new_tokens,
        "prefill": _report_data(prompt, 1),
        "decode": None if step is None else _report_data(step, num_new_tokens),
    }


def _report_data(report: Report, times: int) -> dict[str, Any]:
    """Return the totals of a report and its operations, `times` over."""
    bound = report.bound
    return {
        "flops": report.flops * times,
        "bytes": report.num_bytes * times,
        "intensity": report.intensity,
        "peak_memory": report.memory.peak,
        "seconds_at_least": None if bound is None else bound.seconds * times,
        "seconds_predicted": None
        if bound is None or bound.predicted_seconds is None
        else bound.predicted_seconds * times,
        "balance": None if bound is None else bound.balance,
        "operations": [
            {
                "stack": operation.stack,
                "name": operation.name,
                "formula": operation.formula,
                "flops": operation.flops * times,
                "bytes": operation.num_bytes * times,
                "limited_by": None if bound is None else bound.limited_by[number],
            }
            for number, operation in enumerate(report.operations)
        ],
    }


def _weights_format(model: Model) -> str:
    """Return the format of packed weights, or "full" if the weights are not packed.

    It is that of the first matrix in a layer: in "int4", the token table before it has 8 bits.
    """
    packed = [(name, part.packed) for name, part in model.network.named_modules() if isinstance(part, PackedMatrix)]
    if not packed:
        return "full"
    return _format(next((weight for name, weight in packed if ".layers." in name), packed[0][1]))


def _format(packed: PackedWeight) -> str:
    """Return the name of a format of `clearhead.cost`, or of the next larger one."""
    if packed.high_bits is not None or packed.quants.shape[1] >= packed.columns:  # 5 and 6 bits: the nearest larger
        return "int8"
    return "q4_0" if packed.offsets is None else "int4"
