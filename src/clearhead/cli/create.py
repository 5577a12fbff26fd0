"""Command that writes a model with random weights: create.

clearhead create llama-4-scout --tiny --out my-tiny-llama
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clearhead.cli.app import JsonOption, OverwriteOption, app, check_absent, echo, print_json
from clearhead.cli.threads import takes_threads
from clearhead.errors import unknown_name

if TYPE_CHECKING:
    from clearhead.api import Model


@app.command(epilog="Example: `clearhead create llama-4-scout --tiny --out my-tiny-llama`")
@takes_threads
def create(
    preset: Annotated[str, typer.Argument(help="The architecture; `clearhead presets` lists all.", metavar="PRESET")],
    tiny: Annotated[
        bool,
        typer.Option("--tiny", help="Toy size: the same architecture with small dimensions, a few hundred kilobytes."),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write; by default the name of the preset, with -tiny at toy size.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random weights.")] = 0,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write a model with random weights, to look at an architecture, train it or test a tool with it.

    With --tiny, its tokens are bytes, so it needs no vocabulary; a speech model also has tokens for times. At full
    size it has no tokenizer and takes token ids, and a large preset takes a lot of disk space: `clearhead cost PRESET`
    prints the size of its weights.
    """
    from clearhead.families import presets

    if preset not in presets():
        raise unknown_name("preset", preset, presets(), "`clearhead presets` lists them")
    folder = out or Path(f"{preset}-tiny" if tiny else preset)
    check_absent(folder, overwrite)
    from clearhead.api import create as create_model

    model = _create_tiny(preset, seed) if tiny else create_model(preset, None, seed)
    model.save(folder)
    num_parameters = sum(parameter.numel() for parameter in model.network.parameters())
    if as_json:
        print_json({"folder": str(folder), "preset": preset, "tiny": tiny, "parameters": num_parameters})
    else:
        echo(f"{folder}: {num_parameters:,} parameters")


def _create_tiny(name: str, seed: int) -> "Model":
    """Return a model of toy size with a tokenizer of bytes; that of a speech model also has its special tokens."""
    from clearhead.api import create as create_model
    from clearhead.architecture import AudioEmbedding
    from clearhead.checkpoint import speech_tokens
    from clearhead.families import TinySizes, preset, shrink
    from clearhead.tokenization import byte_tokenizer

    encoder = preset(name).encoder
    audio = encoder.embedding if encoder is not None and isinstance(encoder.embedding, AudioEmbedding) else None
    tokenizer = byte_tokenizer(extra_tokens=() if audio is None else speech_tokens(audio.num_positions + 1))
    model = create_model(shrink(preset(name), TinySizes(vocab_size=tokenizer.vocab_size)), tokenizer, seed)
    end = tokenizer.eos_id  # a decoder that follows an encoder starts with it
    return replace(model, special_ids={"eos_token_id": end, "decoder_start_token_id": end})
