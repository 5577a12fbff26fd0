"""The demo: download a real model, let it answer a question and continue a sentence, and show its architecture.

run(clearhead.cli.app.download_bar)
"""

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from clearhead.api import Model, create, load
from clearhead.architecture import Rope
from clearhead.catalog import DownloadError, get
from clearhead.cli.app import echo, errors, print_message
from clearhead.cli.word_wrap import TextPrinter
from clearhead.errors import ClearheadError
from clearhead.families import llama_config
from clearhead.generation import Stream
from clearhead.summary import print_summary, summarize
from clearhead.tokenization import byte_tokenizer

QUESTION = "What is the capital of France?"
PROMPT = "The three primary colors are red, yellow, and"
NUM_TOKENS = 32


def run(bar: Callable[[str], AbstractContextManager[Callable[[str, int, int], None]]]) -> None:
    """Run the demo; `bar` shows a progress bar during the download.

    Without a network, a small random model takes the place of SmolLM2.
    """
    next_command = "clearhead chat smollm2, clearhead serve smollm2 (API and page at http://127.0.0.1:8000)"
    try:
        with bar("smollm2") as progress:
            get("smollm2", progress)
        model, title = _load_smollm2(), "SmolLM2-135M-Instruct"
    except DownloadError as error:
        echo(f"SmolLM2 could not be downloaded ({error}); a small random model is used instead.\n")
        model, title = random_model(), "A small random model (its text is noise)"
        next_command = "clearhead get smollm2 (when a network is available)"
    if model.has_chat_template:
        print(f"{title} answers a question with its chat template:\n\n{QUESTION}")
        _print_stream("", model.stream(model.encode_chat(QUESTION), max_new_tokens=NUM_TOKENS))
    print(f"{title} continues a sentence:\n")
    _print_stream(PROMPT, model.stream(PROMPT, max_new_tokens=NUM_TOKENS))
    print_summary(summarize(model.config), title)
    print(f"\nNext: {next_command}, clearhead show deepseek-v3, clearhead --help")


def _load_smollm2() -> Model:
    """Load SmolLM2 with the CPU kernels. They are compiled if necessary, so that later commands start with them."""
    try:
        with errors.status("loading SmolLM2; the first time, the CPU kernels are compiled, which takes up to a minute"):
            return load("smollm2", fast=True)
    except ClearheadError as error:
        print_message("note", f"{error}; PyTorch computes instead, several times slower")
        return load("smollm2", fast=False)


def _print_stream(prompt: str, stream: Stream) -> None:
    """Print a prompt and its continuation while it is generated, then the time it took."""
    started = time.perf_counter()
    printer = TextPrinter(sys.stdout)
    printer.write(prompt)
    for piece in stream:
        printer.write(piece)
    printer.finish()
    elapsed_seconds = time.perf_counter() - started
    print(f"\n({len(stream.generation.tokens)} tokens in {elapsed_seconds:.1f} s)\n")


def random_model() -> Model:
    tokenizer = byte_tokenizer()
    config = llama_config(
        width=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        feed_forward=384,
        vocab_size=tokenizer.vocab_size,
        context=512,
        rope=Rope(),
        tied=True,
    )
    return create(config, tokenizer)
