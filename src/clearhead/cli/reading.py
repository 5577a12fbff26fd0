"""Commands that read texts without generating: score, embed, classify.

clearhead score smollm2 "The capital of France is Paris."
"""

import sys
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Annotated

import typer

from clearhead.cli.app import JsonOption, ModelArgument, app, echo, print_json, print_message
from clearhead.cli.checks import check_files, check_model_options
from clearhead.cli.generate import DeviceOption, DtypeOption, load_model
from clearhead.cli.texts import PAST_CONTEXT, typed_text
from clearhead.cli.threads import takes_threads
from clearhead.errors import ClearheadError


@app.command(epilog='Example: `clearhead score smollm2 "The capital of France is Paris." --json`')
@takes_threads
def score(
    model: ModelArgument,
    text: Annotated[
        str | None, typer.Argument(help="The text to score; - reads it from standard input.", metavar="TEXT")
    ] = None,
    file: Annotated[Path | None, typer.Option(help="Score the text of this UTF-8 file, instead of TEXT.")] = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print how likely a text is: perplexity and bits per byte, and with --json the log-probability of every token."""
    if (text is None) == (file is None):
        raise ClearheadError("score needs either a text or --file; give one of the two")
    from clearhead.files import read_text

    check_files([file])
    check_model_options(model, dtype, device)
    text = read_text(file) if file is not None else sys.stdin.read() if text == "-" else typed_text(str(text), "--file")
    loaded = load_model(model, dtype, device)
    from clearhead.evaluation import bits_per_byte  # after the checks of load_model, because it imports torch
    from clearhead.generation import require_tokenizer

    tokenizer, scored = require_tokenizer(loaded.tokenizer), loaded.score(text)
    bits = bits_per_byte(text, scored, tokenizer)
    if as_json:
        logprobs = zip(scored.tokens, [None, *scored.logprobs], strict=True)
        tokens = [{"id": token, "text": tokenizer.token_text(token), "logprob": logprob} for token, logprob in logprobs]
        print_json({"perplexity": scored.perplexity, "bits_per_byte": bits, "tokens": tokens})
    else:
        echo(f"perplexity: {scored.perplexity:,.4f}\nbits per byte: {bits:.4f}")
    if len(scored.tokens) > loaded.config.context:
        print_message("note", PAST_CONTEXT.format(context=loaded.config.context))


@app.command(epilog='Example: `clearhead embed minilm "A cat sat." "The dog ran." --json`')
@takes_threads
def embed(
    model: ModelArgument,
    texts: Annotated[list[str], typer.Argument(help="One or more texts to embed.", metavar="TEXT")],
    prompt_name: Annotated[str | None, typer.Option(help="Name of a prompt of the model, such as query.")] = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the embedding of each text on one line.

    A sentence-transformers model gives its own vectors. Any other model gives a vector of length 1, the mean of the
    last hidden states. Dot products of vectors of length 1 are cosine similarities.
    """
    vectors = load_model(model, dtype, device).embed(texts, prompt_name=prompt_name).tolist()
    if as_json:
        print_json([{"text": text, "embedding": vector} for text, vector in zip(texts, vectors, strict=True)])
    for vector in () if as_json else vectors:
        echo(" ".join(f"{number:.7g}" for number in vector))


@app.command(
    epilog='Example: `clearhead classify distilbert/distilbert-base-uncased-finetuned-sst-2-english "I liked it."`'
)
@takes_threads
def classify(
    model: ModelArgument,
    texts: Annotated[list[str], typer.Argument(help="One or more texts to classify.", metavar="TEXT")],
    pair: Annotated[
        str | None, typer.Option(help="A second text, for models that compare two: each text is paired with it.")
    ] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut texts off at the model's longest input, instead of failing.")
    ] = False,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the most likely label of each text and its score, or the label of each token.

    --json prints the scores of all labels.
    """
    loaded = load_model(model, dtype, device)
    inputs = [text if pair is None else (text, pair) for text in texts]
    results = loaded.classify(inputs, truncate=truncate)
    if as_json:
        rows = [asdict(each) if is_dataclass(each) else [asdict(token) for token in each] for each in results]
        print_json([{"text": text, "result": row} for text, row in zip(texts, rows, strict=True)])
        return
    for result in results:
        for each in result if isinstance(result, list) else [result]:
            token = getattr(each, "token", None)  # the labels of a whole text have none
            echo(f"{each.score:.4f}  {each.label}" + (f"  {token}" if token is not None else ""))
