"""The command that turns speech into text: transcribe.

clearhead transcribe path/to/whisper-folder speech.wav --timestamps
"""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal, cast, get_args

import typer

from clearhead.cli.app import JsonOption, ModelArgument, app, echo, print_json
from clearhead.cli.checks import check_files, check_model_options
from clearhead.cli.generate import DeviceOption, DtypeOption, load_model
from clearhead.cli.threads import takes_threads
from clearhead.errors import unknown_name

Task = Literal["transcribe", "translate"]


@app.command(epilog="Example: `clearhead transcribe path/to/whisper-folder speech.wav --language de --timestamps`")
@takes_threads
def transcribe(
    model: ModelArgument,
    file: Annotated[Path, typer.Argument(help="A WAV file: PCM, any sampling rate, mono or stereo.", metavar="FILE")],
    language: Annotated[
        str | None, typer.Option(help="Code of the language spoken, such as de; by default the likeliest one.")
    ] = None,
    task: Annotated[
        str, typer.Option(help="transcribe writes down what is said, translate writes it in English.")
    ] = "transcribe",
    timestamps: Annotated[
        bool, typer.Option("--timestamps", help="Print each segment with the seconds at which it begins and ends.")
    ] = False,
    beams: Annotated[
        int | None, typer.Option(help="Number of beams; by default the likeliest token at each step.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Maximum number of tokens in 30 seconds; by default what the model can read.")
    ] = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print what is said in a recording, with a speech model such as Whisper.

    A recording longer than 30 seconds is read in windows. --json prints language, duration and all segments.
    """
    if task not in get_args(Task):
        raise unknown_name("task", task, get_args(Task))
    check_files([file])
    check_model_options(model, dtype, device)
    result = load_model(model, dtype, device).transcribe(
        file,
        language=language,
        task=cast(Task, task),
        timestamps=timestamps,
        beams=beams,
        max_new_tokens=max_new_tokens,
    )
    if as_json:
        print_json(asdict(result))
    elif timestamps:
        for segment in result.segments:
            echo(f"[{segment.start:.2f} - {segment.end:.2f}] {segment.text}")
    else:
        echo(result.text)
