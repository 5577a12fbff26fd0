"""Commands about data: tokenizer train, shards write, shards verify.

clearhead tokenizer train corpus.txt --kind bpe --vocab-size 8000 --out my-tokenizer
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clearhead.cli.app import JsonOption, OverwriteOption, app, check_absent, print_json, tell

if TYPE_CHECKING:
    from clearhead.data import Index

TRAIN = "Example: `clearhead tokenizer train corpus.txt --kind bpe --vocab-size 8000 --out my-tokenizer`"
WRITE = "Example: `clearhead shards write books --tokenizer my-tokenizer --out corpus`"

tokenizer_app = typer.Typer(no_args_is_help=True, help="Learn a vocabulary.", epilog=TRAIN)
shards_app = typer.Typer(no_args_is_help=True, help="Token files for corpora larger than memory.", epilog=WRITE)
app.add_typer(tokenizer_app, name="tokenizer")
app.add_typer(shards_app, name="shards")

FilesArgument = Annotated[list[Path], typer.Argument(help="Text or JSON lines files, .gz too, or folders of them.")]
UnitOption = Annotated[str, typer.Option(help="What is a document in a text file: file, paragraph or line.")]
FieldOption = Annotated[str, typer.Option(help="Where the text is in a line of JSON.")]


@tokenizer_app.callback()
def tokenizer_group() -> None:
    """Keeps `train` a name of its own while it is the only command."""


@tokenizer_app.command("train", epilog=TRAIN)
def train_tokenizer(
    files: FilesArgument,
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    kind: Annotated[str, typer.Option(help="bpe, unigram, wordpiece, byte or character.")] = "bpe",
    vocab_size: Annotated[int | None, typer.Option(help="Tokens in all; none for byte and character.")] = None,
    extra_token: Annotated[list[str] | None, typer.Option(help="A special token to reserve; may be repeated.")] = None,
    unit: UnitOption = "file",
    field: FieldOption = "text",
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Learn a vocabulary from texts and write it as tokenizer.json."""
    from clearhead.tokenization import train

    check_absent(out / "tokenizer.json", overwrite)
    texts = _texts(files, unit, field)
    tokenizer = train.train_tokenizer(texts, kind, vocab_size, extra_tokens=extra_token or ())  # type: ignore[arg-type]
    tokenizer.save(out)
    if vocab_size is not None and tokenizer.vocab_size < vocab_size:
        tell("note", f"these texts hold no more than {tokenizer.vocab_size:,} of the {vocab_size:,} tokens asked for")
    if as_json:
        print_json({"folder": str(out), "kind": kind, "vocab_size": tokenizer.vocab_size})
    else:
        typer.echo(f"{out}: {tokenizer.vocab_size:,} tokens")


@shards_app.command("write", epilog=WRITE)
def write(
    files: FilesArgument,
    tokenizer: Annotated[Path, typer.Option(help="The folder or file of the tokenizer.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    unit: UnitOption = "file",
    field: FieldOption = "text",
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Tokenize texts into files that training reads in place."""
    from clearhead.data import INDEX, document_ids, write_shards
    from clearhead.tokenization import load_tokenizer

    check_absent(out / INDEX, overwrite)
    loaded = load_tokenizer(tokenizer)
    documents = (document_ids(text, loaded) for text in _texts(files, unit, field))
    _tell(out, write_shards(out, documents, loaded, overwrite=overwrite), as_json)


@shards_app.command("verify", epilog="Example: `clearhead shards verify corpus`")
def verify(
    folder: Annotated[Path, typer.Argument(help="A folder of token shards.")], as_json: JsonOption = False
) -> None:
    """Read every byte of token shards and compare it with what was written."""
    from clearhead.data import verify_shards

    _tell(folder, verify_shards(folder), as_json)


def _tell(folder: Path, index: "Index", as_json: bool) -> None:
    told = {
        "folder": str(folder),
        "shards": len(index.shards),
        "documents": sum(shard.num_documents for shard in index.shards),
        "tokens": sum(shard.num_tokens for shard in index.shards),
    }
    if as_json:
        print_json(told)
    else:
        typer.echo(f"{folder}: {told['tokens']:,} tokens of {told['documents']:,} documents")


def _texts(files: list[Path], unit: str, field: str) -> Iterator[str]:
    from clearhead.data import read_texts

    for file in files:
        yield from read_texts(file, unit, field)  # type: ignore[arg-type]
