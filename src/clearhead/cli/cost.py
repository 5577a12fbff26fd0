"""Commands about what a model costs: cost, calibrate, curves.

clearhead cost llama-3.1-8b --phase decode --context 8192 --device h200
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from clearhead.cli.app import JsonOption, OverwriteOption, app, check_absent, errors, print_json, table_console
from clearhead.errors import ClearheadError


@app.command(epilog="Example: `clearhead cost llama-3.1-8b --phase decode --context 8192 --device h200`")
def cost(
    model: Annotated[str, typer.Argument(help="A preset, an installed name, a folder or a .gguf file.")],
    phase: Annotated[
        str | None, typer.Option(help="train, prefill or decode; prefill, or train where --tokens is given.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Rows at once.")] = 1,
    context: Annotated[int | None, typer.Option(help="Tokens of a row; what the model was made for otherwise.")] = None,
    source: Annotated[int | None, typer.Option(help="Tokens of an encoder's side; as context otherwise.")] = None,
    device: Annotated[
        str | None, typer.Option(help="h200, h100, a100, rtx-4090, l40s; cpu or cuda: this machine, once calibrated.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16, float32 or float64.")] = "bfloat16",
    quant: Annotated[str | None, typer.Option(help="Weights in int8, int4, q4_0, q4_1 or q8_0.")] = None,
    optimizer: Annotated[str, typer.Option(help="adamw or sgd.")] = "adamw",
    recompute: Annotated[bool, typer.Option("--recompute", help="Training keeps block inputs only.")] = False,
    tokens: Annotated[float | None, typer.Option(help="train: tokens of the whole training, as in 300e9.")] = None,
    gpus: Annotated[int, typer.Option(help="How many share the work.")] = 1,
    parallel: Annotated[str, typer.Option(help="ddp, fsdp or tp.")] = "ddp",
    measure: Annotated[bool, typer.Option("--measure", help="Run it on this machine and compare.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Parameters, FLOPs, bytes, memory and time of a model, from its config alone."""
    from clearhead.checkpoint import read_config
    from clearhead.costs import as_data, compare, load_calibration, print_comparisons, print_report
    from clearhead.costs import cost as cost_of
    from clearhead.families import preset
    from clearhead.families import presets as names
    from clearhead.training import keep_freed_memory

    here = measured_device(device) if measure else None
    config = preset(model) if model in names() and not Path(model).exists() else read_config(model)
    report = cost_of(
        config,
        phase=phase,  # type: ignore[arg-type]  # checked there, with the nearest right name
        batch=batch,
        context=context,
        source=source,
        dtype=dtype,
        quant=quant,
        optimizer=optimizer,  # type: ignore[arg-type]
        recompute=recompute,
        tokens=tokens,
        device=device,
        gpus=gpus,
        parallel=parallel,  # type: ignore[arg-type]
    )
    rows = []
    if here is not None:
        if here == "cpu" and report.workload.phase == "train":
            keep_freed_memory()
        with errors.status("measuring"):
            rows = compare(replace(report.workload, device_type=here), load_calibration(here))
    if as_json:
        measured = {"measured": [asdict(row) | {"ratio": row.ratio} for row in rows]} if measure else {}
        print_json(as_data(report) | measured)
        return
    print_report(report, model, table_console())
    if here is not None:
        print_comparisons(rows, here, table_console())


def measured_device(asked: str | None) -> Literal["cpu", "cuda"]:
    import torch

    here: Literal["cpu", "cuda"] = "cpu" if asked == "cpu" or not torch.cuda.is_available() else "cuda"
    if asked not in (None, here):
        raise ClearheadError(f"what is measured is this machine, which is {here} and not {asked}; say --device {here}")
    return here


@app.command(epilog="Example: `clearhead calibrate --device cpu`")
def calibrate(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Measure this machine in under a minute, so that `cost --device cpu|cuda` can predict times here."""
    from clearhead.costs import measure_machine, save_calibration

    with errors.status("measuring") as status:
        found = measure_machine(device, lambda what: status.update(f"measuring {what}"))
    path = save_calibration(found)
    if as_json:
        print_json(asdict(found) | {"path": str(path)})
        return
    typer.echo(f"{found.machine}: {found.bytes_per_second / 1e9:.1f} GB/s")
    for dtype, rates in found.products.items():
        typer.echo(f"{dtype}: up to {max(rate.per_second for rate in rates) / 1e12:.3g} TFLOP/s")
    typer.echo(f"kept in {path}")


@app.command(epilog="Example: `clearhead curves curves.png`")
def curves(
    path: Annotated[Path, typer.Argument(help="The picture to write, .png or .svg.")],
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Plot how work and time grow with length: O(n²) for a sequence, O(n) for a cached token and for an RNN."""
    from clearhead.costs import device as find_device
    from clearhead.costs import draw_curves, measure_curves
    from clearhead.files import check_output

    check_output(path, [".png", ".svg"])
    check_absent(path, overwrite, "name")
    calibration = find_device(measured_device(device)).calibration
    assert calibration is not None
    with errors.status("measuring"):
        found = measure_curves(calibration)
    draw_curves(found, path)
    if as_json:
        print_json({"path": str(path), "curves": [asdict(curve) for curve in found]})
    else:
        typer.echo(str(path))
