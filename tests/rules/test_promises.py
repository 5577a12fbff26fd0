"""The limits in docs/promises.md are those of the code."""

import inspect
import re

from clearhead import config, errors, files, terminal
from clearhead.data import sources
from clearhead.tokenization import render_chat
from clearhead.training import recipe
from tests.rules.test_readme import PAGES, ROOT

PAGE = PAGES[ROOT / "docs" / "promises.md"]


def test_the_table_of_limits_equals_the_code():
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", PAGE.split("## Limits")[1], re.MULTILINE)[1:])
    assert rows == {
        "a config.json or another JSON file beside a model": f"{files.MAX_JSON_BYTES >> 20} MiB",
        "the header of a safetensors file, an index of shards": f"{files.MAX_JSON_TABLE_BYTES >> 20} MiB",
        "a tokenizer file": f"{files.MAX_BYTES >> 20} MiB",
        "a recipe": f"{recipe._MAX_BYTES >> 20} MiB",
        "layers of a network": f"{config.MAX_LAYERS:,}",
        "a width, vocabulary, context or another whole number of a config, except a seed": f"{config.MAX_SIZE:,}",
        "rendering a chat template": (
            f"{inspect.signature(render_chat).parameters['limit_seconds'].default:g} seconds of processor time"
        ),
        "the text that a gzip file expands to": (
            f"{sources.MAX_EXPANSION} times its size, and {sources.FREE_EXPANSION_BYTES >> 20} MiB more"
        ),
        "the message of an error, in which long values of files are shortened": (
            f"{errors._MAX_MESSAGE_CHARACTERS:,} characters"
        ),
        "a message on the terminal": f"{terminal._MAX_MESSAGE_LENGTH:,} characters",
    }


def test_the_page_names_the_commands_that_repeat_its_figures():
    assert "python -m tests.slow.killed_runs --kills 1000" in PAGE
    assert "python -m tests.slow.mutated_files --files 100000" in PAGE
