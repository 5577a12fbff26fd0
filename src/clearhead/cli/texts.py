"""What `clearhead generate` makes of a prompt, and how it prints the texts.

prompt = prepare_prompt(model, "What is the capital of France?")
generation = print_stream(prompt, model.stream(prompt.input))

An instruction-tuned model answers a plain text with its chat template. Any other prompt is continued as it is.
"""

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from clearhead.cli.app import print_json, print_message
from clearhead.cli.word_wrap import TextPrinter
from clearhead.errors import ClearheadError
from clearhead.terminal import TerminalConsole

if TYPE_CHECKING:
    from clearhead.api import Model
    from clearhead.generation import Generation, Prompt, Stream
    from clearhead.tokenization import Tokenizer

_DIM = "\x1b[2m"
PAST_CONTEXT = "the text is longer than the model's context of {context:,} tokens; its quality may degrade beyond that"


def typed_text(argument: str, how_to_read_files: str = "- <") -> str:
    """Return the text of an argument; - reads it from standard input, without the line break at its end.

    Print a note if the text is the name of a file, because its user may have meant the content.
    """
    if argument == "-":
        return sys.stdin.read().removesuffix("\n")
    if os.path.isfile(argument):
        how = f"{how_to_read_files} {shlex.quote(argument)}"
        print_message("note", f"the text is {argument!r}, the name of a file; to use what the file contains: {how}")
    return argument


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt as the user gave it, and the form in which the model reads it."""

    text: str
    input: "Prompt"  # the text, or its token ids in the chat template
    is_chat: bool  # whether the input uses the chat template
    is_continued: bool  # whether the generated text follows the prompt, as it does without an encoder and a template


def prepare_prompt(model: "Model", text: str, raw: bool = False, system: str | None = None) -> PreparedPrompt:
    """Apply the chat template if the model has one and the text is plain; print a note that says so.

    raw: continue the text even if the model has a chat template.
    system: the system message of the chat template.
    """
    from clearhead.api import RecurrentBaseline

    if not model.has_chat_template:
        if system is not None:
            raise ClearheadError("this model has no chat template, so it reads no system message; leave out --system")
        is_continued = not isinstance(model, RecurrentBaseline) and not model.config.is_encoder_decoder
        return PreparedPrompt(text, text, is_chat=False, is_continued=is_continued)
    assert model.tokenizer is not None
    if raw:
        print_message("note", "continuing the text; without --raw, the model answers with its chat template")
    elif system is None and _has_special_tokens(model.tokenizer, text):
        print_message("note", "continuing the text, because it contains special tokens of the chat template")
    else:
        print_message("note", "answering with the chat template; --raw continues the text instead")
        return PreparedPrompt(text, model.encode_chat(text, system), is_chat=True, is_continued=False)
    return PreparedPrompt(text, text, is_chat=False, is_continued=True)


def _has_special_tokens(tokenizer: "Tokenizer", text: str) -> bool:
    return not tokenizer.special_ids.isdisjoint(tokenizer.encode(text, add_special_tokens=False))


# --- printing


def print_stream(prompt: PreparedPrompt, stream: "Stream") -> "Generation":
    """Print a text while it is generated."""
    printer = TextPrinter(sys.stdout)
    _echo(prompt, printer)
    try:
        for piece in stream:
            printer.write(piece)
    finally:
        printer.finish()
    return stream.generation


def print_generations(prompt: PreparedPrompt, generations: "Sequence[Generation]") -> None:
    """Print one text, or several with numbers."""
    printer = TextPrinter(sys.stdout)
    for number, generation in enumerate(generations, start=1):
        if len(generations) > 1:
            printer.write(f"[{number}] ")
        _echo(prompt, printer)
        printer.write(generation.text)
        printer.finish()


def _echo(prompt: PreparedPrompt, printer: TextPrinter) -> None:
    """Print a prompt that is continued, dim, on a terminal. In a pipe, only the generated text is printed."""
    if prompt.is_continued and printer.is_terminal:
        has_styles = TerminalConsole().color_system is not None  # a dumb terminal has none
        printer.write(prompt.text, style=_DIM if has_styles else "")


def print_generations_as_json(prompt: PreparedPrompt, generations: "Sequence[Generation]") -> None:
    """Print one object, or a list of several."""
    given = {"prompt": prompt.text, "chat_template": prompt.is_chat}
    data = [given | asdict(generation) for generation in generations]
    print_json(data[0] if len(data) == 1 else data)


# --- notes about the result


def print_notes(model: "Model", prompt: PreparedPrompt, generations: "Sequence[Generation]") -> None:
    """Print a note for each text that is empty, and one if a text exceeds the context or was cut off."""
    for number, generation in enumerate(generations, start=1):
        if reason := _why_empty(model.tokenizer, generation):
            print_message("note", f"[{number}] {reason}" if len(generations) > 1 else reason)
    context = model.network.config.context
    if any(generation.num_past_context for generation in generations):
        print_message("note", PAST_CONTEXT.format(context=context))
    elif any(generation.finish_reason == "context" for generation in generations):
        print_message("note", f"the text ends because the model's context of {context:,} tokens is full")
    elif prompt.is_chat and (cut := [each for each in generations if each.finish_reason == "length" and each.tokens]):
        length = max(len(each.tokens) for each in cut)
        print_message("note", f"the answer was cut off after {length:,} tokens; --max-new-tokens allows a longer one")


def _why_empty(tokenizer: "Tokenizer | None", generation: "Generation") -> str | None:
    """Return why a text shows nothing, or None if it shows something or another note explains it."""
    if generation.text.strip() or generation.finish_reason == "context" or tokenizer is None:
        return None
    if not generation.tokens:
        return "the text is empty because --max-new-tokens is 0"
    names = [tokenizer.token_text(token) for token in generation.tokens]
    if generation.finish_reason == "stop" and len(names) == 1:
        return f"the model ended at once with {names[0]}"
    shown = " ".join(repr(name) for name in names[:8]) + " …" * (len(names) > 8)
    return f"the model generated only tokens that show no text: {shown}"
