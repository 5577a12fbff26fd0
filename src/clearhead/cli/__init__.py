"""The command line: parse, call one function, print.

    clearhead --help

Each of these modules defines commands, in the order of --help:

    models, create, installed   presets, show, get, convert; create; list, info, remove
    generate, serve             generate, chat, verify, demo; serve
    reading, speech             score, embed, classify; transcribe
    data, trace                 tokenizer and shards; trace, book
    study, train, evaluate      study; train; eval
    cost, bench, bench_serve    cost, calibrate, curves; bench decode, bench prefill; bench serve

They share these:

    app                         the Typer app, the entry point, progress bars and output helpers
    checks                      what the user gave, checked before torch is imported
    sampling, threads           the sampling options; --threads
    texts, word_wrap            what generate makes of a prompt, and how texts are printed
    demo                        what `make demo` shows
    chat_session, chat_commands, chat_input, chat_settings
                                the chat in a terminal
"""

from clearhead.cli import models, create, installed, generate, serve, reading, speech, data, trace  # noqa: I001
from clearhead.cli import study, train, evaluate, cost, bench, bench_serve
from clearhead.cli.app import main

__all__ = [
    "bench",
    "bench_serve",
    "cost",
    "create",
    "data",
    "evaluate",
    "generate",
    "installed",
    "main",
    "models",
    "reading",
    "serve",
    "speech",
    "study",
    "trace",
    "train",
]
