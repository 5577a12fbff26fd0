"""Define the commands that prepare data: tokenizer train, shards write, shards verify.

clearhead tokenizer train books --kind bpe --vocab-size 8000 --out my-tokenizer
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clearhead.cli.app import JsonOption, OverwriteOption, app, check_absent, echo, print_json, print_message
from clearhead.cli.checks import check_exists, find_texts

if TYPE_CHECKING:
    from clearhead.data import ShardIndex

_TRAIN_EXAMPLE = "Example: `clearhead tokenizer train books --kind bpe --vocab-size 8000 --out my-tokenizer`"
_WRITE_EXAMPLE = "Example: `clearhead shards write books --tokenizer my-tokenizer --out corpus`"

_tokenizer_app = typer.Typer(no_args_is_help=True, help="Train a tokenizer.", epilog=_TRAIN_EXAMPLE)
_shards_app = typer.Typer(
    no_args_is_help=True, help="Write and verify token shards, for corpora larger than memory.", epilog=_WRITE_EXAMPLE
)
app.add_typer(_tokenizer_app, name="tokenizer")
app.add_typer(_shards_app, name="shards")

FilesArgument = Annotated[
    list[Path],
    typer.Argument(
        help="Text or JSON lines files, also as .gz, folders that contain them, or data sets.", metavar="FILE"
    ),
]
UnitOption = Annotated[str, typer.Option(help="What counts as one document in a text file: file, paragraph or line.")]
FieldOption = Annotated[str, typer.Option(help="Key of the text in each object of a JSON lines file.")]


@_tokenizer_app.callback()
def tokenizer_group() -> None:
    """Keep `train` a subcommand: Typer would merge a single command into its group."""


@_tokenizer_app.command("train", epilog=_TRAIN_EXAMPLE)
def train_command(
    files: FilesArgument,
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    kind: Annotated[str, typer.Option(help="Kind of tokenizer: bpe, unigram, wordpiece, byte or character.")] = "bpe",
    vocab_size: Annotated[
        int | None,
        typer.Option(help="Number of tokens; required for bpe, unigram and wordpiece, not allowed for others."),
    ] = None,
    extra_token: Annotated[list[str] | None, typer.Option(help="Special token to add; may be repeated.")] = None,
    unit: UnitOption = "file",
    field: FieldOption = "text",
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Learn a vocabulary from texts and write it as tokenizer.json."""
    paths = find_texts(files)
    check_absent(out / "tokenizer.json", overwrite)
    from clearhead.tokenization import train_tokenizer

    texts = _read_all(paths, unit, field)
    tokenizer = train_tokenizer(texts, kind, vocab_size, extra_tokens=extra_token or ())  # type: ignore[arg-type]
    tokenizer.save(out)
    if vocab_size is not None and tokenizer.vocab_size < vocab_size:
        print_message("note", f"the texts yield only {tokenizer.vocab_size:,} of the requested {vocab_size:,} tokens")
    if as_json:
        print_json({"folder": str(out), "kind": kind, "vocab_size": tokenizer.vocab_size})
    else:
        echo(f"{out}: {tokenizer.vocab_size:,} tokens")


@_shards_app.command("write", epilog=_WRITE_EXAMPLE)
def write_command(
    files: FilesArgument,
    tokenizer: Annotated[Path, typer.Option(help="Folder or file of the tokenizer.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    unit: UnitOption = "file",
    field: FieldOption = "text",
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Tokenize texts into shards, which training reads from disk."""
    paths = find_texts(files)
    check_exists([tokenizer], "a folder with a tokenizer, or a tokenizer file")
    from clearhead.data import INDEX_FILE, document_ids, write_shards
    from clearhead.tokenization import load_tokenizer

    check_absent(out / INDEX_FILE, overwrite)
    loaded = load_tokenizer(tokenizer)
    documents = (document_ids(text, loaded) for text in _read_all(paths, unit, field))
    _print_index(out, write_shards(out, documents, loaded, overwrite=overwrite), as_json)


@_shards_app.command("verify", epilog="Example: `clearhead shards verify corpus`")
def verify_command(
    folder: Annotated[Path, typer.Argument(help="Folder of token shards.", metavar="FOLDER")],
    as_json: JsonOption = False,
) -> None:
    """Read every byte of token shards and compare it with the checksums of the index."""
    check_exists([folder], "a folder that `clearhead shards write` made")
    from clearhead.data import verify_shards

    _print_index(folder, verify_shards(folder), as_json)


def _print_index(folder: Path, index: "ShardIndex", as_json: bool) -> None:
    summary = {
        "folder": str(folder),
        "shards": len(index.shards),
        "documents": sum(shard.num_documents for shard in index.shards),
        "tokens": sum(shard.num_tokens for shard in index.shards),
    }
    if as_json:
        print_json(summary)
    else:
        echo(f"{folder}: {summary['tokens']:,} tokens in {summary['documents']:,} documents")


def _read_all(files: list[Path], unit: str, field: str) -> Iterator[str]:
    from clearhead.data import read_texts

    for file in files:
        yield from read_texts(file, unit, field)  # type: ignore[arg-type]
