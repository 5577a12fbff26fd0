"""Commands about the cost of a model: cost, calibrate and curves.

clearhead cost llama-3.1-8b --phase decode --context 8192 --device h200
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from clearhead.cli.app import (
    ARCHITECTURE_HELP,
    JsonOption,
    OverwriteOption,
    app,
    check_absent,
    echo,
    errors,
    print_json,
    print_message,
    step_bar,
    table_console,
)
from clearhead.cli.checks import check_cost_options, check_installed, check_measurable
from clearhead.cli.threads import takes_threads
from clearhead.errors import ClearheadError

if TYPE_CHECKING:
    from clearhead.costs import Comparison, Workload

DeviceOption = Annotated[str, typer.Option(help="The device to measure: cpu or cuda.")]
MeasureOption = Annotated[
    bool, typer.Option("--measure", help="Run the workload on this machine and compare with the prediction.")
]


@app.command(
    epilog="Examples: `clearhead cost llama-3.1-8b --phase decode --context 8192 --device h200`, "
    "`clearhead cost llama-3.1-8b --training-tokens 1e12 --batch 64 --gpus 8 --parallel fsdp --device h100`"
)
@takes_threads
def cost(
    model: Annotated[str, typer.Argument(help=ARCHITECTURE_HELP, metavar="MODEL")],
    phase: Annotated[
        str | None,
        typer.Option(help="Phase: train, prefill or decode; by default prefill, or train with --training-tokens."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Number of sequences, over all GPUs.")] = 1,
    context: Annotated[
        int | None, typer.Option(help="Number of tokens per sequence; by default the model's context.")
    ] = None,
    source: Annotated[
        int | None,
        typer.Option(help="Number of tokens per source sequence of an encoder-decoder; by default --context."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Also compute the time on h200, h100, a100, rtx-4090 or l40s; or on this machine (cpu or cuda), "
            "after `clearhead calibrate`."
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Precision of weights and activations: bfloat16, float16, float32 or float64.")
    ] = "bfloat16",
    weights: Annotated[
        str, typer.Option(help="Format of the weights: full (in --dtype), int8, int4, q4_0, q4_1 or q8_0.")
    ] = "full",
    optimizer: Annotated[str, typer.Option(help="Optimizer of the training: adamw or sgd.")] = "adamw",
    recompute: Annotated[
        bool,
        typer.Option("--recompute", help="In training, recompute the activations of each block in the backward pass."),
    ] = False,
    training_tokens: Annotated[
        float | None,
        typer.Option(
            help="Number of tokens of a whole training run, such as 300e9, to report its total FLOPs; implies --phase "
            "train."
        ),
    ] = None,
    gpus: Annotated[int, typer.Option(help="Number of GPUs.")] = 1,
    parallel: Annotated[
        str,
        typer.Option(
            help="What to split across GPUs: the batch (ddp), also the weights (fsdp), or heads and feed-forwards (tp)."
        ),
    ] = "ddp",
    measure: MeasureOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compute time, tokens per second, memory, FLOPs and parameters of a model from its config alone.

    The answer comes first: how long it takes and whether it fits the --device. Formulas and tables follow. A context
    longer than the one that the model was made for is marked.
    """
    names = {"phase": phase, "dtype": dtype, "weights": weights, "optimizer": optimizer, "parallel": parallel}
    names["device"] = device
    sizes: dict[str, float | None] = {"batch": batch, "context": context, "source": source, "gpus": gpus}
    sizes["training_tokens"] = training_tokens
    check_cost_options(model, names, sizes)
    from clearhead.api import find_config
    from clearhead.checkpoint import is_recurrent
    from clearhead.costs import cost as compute_cost
    from clearhead.costs import print_comparisons, print_report, report_to_dict

    if is_recurrent(model):
        given = {"phase": phase, "device": device, "training-tokens": training_tokens}
        given["weights"] = None if weights == "full" else weights
        others = [name for name, value in given.items() if value is not None]
        _print_recurrent_cost(model, batch, context, source, others, as_json)
        return
    measured_device = _require_this_machine(device) if measure else None
    report = compute_cost(find_config(model), recompute=recompute, **names, **sizes)  # type: ignore[arg-type]
    comparisons = [] if measured_device is None else _run_and_compare(report.workload, measured_device)
    if as_json:
        measured = {"measured": [asdict(one) | {"ratio": one.ratio} for one in comparisons]} if measure else {}
        print_json(report_to_dict(report) | measured)
        return
    print_report(report, model, table_console())
    if measured_device is not None:
        print_comparisons(comparisons, measured_device, table_console())


def _run_and_compare(workload: "Workload", device: Literal["cpu", "cuda"]) -> list["Comparison"]:
    """Run a workload on this machine and return predictions and measurements."""
    from clearhead.costs import compare_with_measurement, load_calibration
    from clearhead.training import reuse_freed_memory

    if device == "cpu" and workload.phase == "train":
        reuse_freed_memory()
    with errors.status("measuring"):
        return compare_with_measurement(replace(workload, device_type=device), load_calibration(device))


def _print_recurrent_cost(
    folder: str, batch: int, context: int | None, source: int | None, other_options: list[str], as_json: bool
) -> None:
    """Print parameters, FLOPs of one forward pass and sequential steps of a recurrent network."""
    from clearhead.api import recurrent_cost

    if other_options:
        raise ClearheadError(
            f"{folder} is a recurrent network; its cost depends on --batch, --context and --source only, not on "
            f"--{other_options[0]}"
        )
    found = recurrent_cost(folder, batch=batch, target=context, source=source)
    if as_json:
        print_json(found)
        return
    echo(f"{folder}: recurrent encoder-decoder, {found['parameters']:,} parameters")
    echo(f"{batch:,} × ({found['source']:,} source + {found['target']:,} target) tokens: {found['flops']:,} FLOPs")
    for part, flops in found["flops_by_part"].items():
        echo(f"  {part:<10} {flops:>15,}")
    echo(f"sequential steps: {found['sequential_steps']:,}, one per token; a Transformer reads all tokens at once")


def _require_this_machine(device: str | None) -> Literal["cpu", "cuda"]:
    """Return the device to measure. Raise ClearheadError if another one is requested."""
    import torch

    available: Literal["cpu", "cuda"] = "cpu" if device == "cpu" or not torch.cuda.is_available() else "cuda"
    if device not in (None, available):
        raise ClearheadError(f"a measurement runs on this machine; use --device {available} instead of {device}")
    return available


@app.command(epilog="Example: `clearhead calibrate --device cpu`")
@takes_threads
def calibrate(
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Measure this machine, so that `cost --device cpu|cuda` can predict times.

    It takes about a minute, and longer if other processes keep the machine busy. Ctrl-C stops it; the same command then
    continues with what is not yet measured.
    """
    check_measurable(device)
    from clearhead.costs import measure_machine, save_calibration

    with step_bar("measuring") as progress:
        try:
            calibration = measure_machine(device, progress)
        except KeyboardInterrupt:
            kept = f"{progress.done} of {progress.total} measurements are kept"
            print_message("note", f"stopped: {kept}; the same command continues with the others")
            raise typer.Exit(130) from None
    path = save_calibration(calibration)
    if as_json:
        print_json(asdict(calibration) | {"path": str(path)})
        return
    echo(f"{calibration.machine}: memory bandwidth {calibration.bytes_per_second / 1e9:.1f} GB/s")
    for dtype, rates in calibration.products.items():
        echo(f"{dtype}: up to {max(rate.per_second for rate in rates) / 1e12:.3g} TFLOP/s")
    echo(f"saved to {path}")


@app.command(epilog="Example: `clearhead curves curves.png`")
def curves(
    path: Annotated[Path, typer.Argument(help="The picture to write: .png or .svg.", metavar="PATH")],
    device: DeviceOption = "cpu",
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Plot how FLOPs and time grow with length n: O(n²) for a sequence, O(n) for a cached token and for an RNN.

    The times are measured on this machine, after `clearhead calibrate`.
    """
    from clearhead.files import check_output_path

    check_measurable(device)
    check_output_path(path, [".png", ".svg"])
    check_absent(path, overwrite, "name")
    check_installed(["matplotlib"], "a plot", "plot")
    from clearhead.costs import draw_curves, find_device, measure_curves

    calibration = find_device(_require_this_machine(device)).calibration
    assert calibration is not None
    with errors.status("measuring"):
        measured = measure_curves(calibration)
    draw_curves(measured, path)
    if as_json:
        print_json({"path": str(path), "curves": [asdict(curve) for curve in measured]})
    else:
        echo(str(path))
