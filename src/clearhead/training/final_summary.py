"""Say how a run ended: its losses, a sample, and the commands to try next.

for line in summarize_result(result, model, samples): reporter.print(line)
"""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from clearhead.api import Model, RecurrentBaseline
from clearhead.training.finish import Sample
from clearhead.training.result import TrainingResult

_SAMPLE_CHARACTERS, _PROMPT_CHARACTERS = 400, 40


def summarize_result(result: TrainingResult, model: Model, samples: Sequence[Sample]) -> list[str]:
    """Return the losses of a run, the first sample, and commands that use the trained model."""
    losses = {"loss": result.loss, "validation loss": result.validation_loss}
    shown = ", ".join(f"{name} {value:.4f}" for name, value in losses.items() if value is not None)
    lines = [f"finished {result.num_steps:,} steps{': ' + shown if shown else ''}"]
    if samples:
        text = samples[0].text.strip()
        cut = " …" if len(text) > _SAMPLE_CHARACTERS else ""
        lines += [f"sample ({result.folder / 'sample.txt'}):", _indent(text[:_SAMPLE_CHARACTERS] + cut)]
    if (result.folder / "adapter").is_dir():
        lines.append(f"adapter alone: {result.folder / 'adapter'} (clearhead.load reads it together with its model)")
    commands = list(next_commands(model, samples, result.folder / "model"))
    return [*lines, "next:", *(f"  {command}" for command in commands)] if commands else lines


def next_commands(model: Model, samples: Sequence[Sample], folder: Path) -> Iterator[str]:
    """Yield a command for each thing that the model can do: generate, chat, trace."""
    recurrent = isinstance(model, RecurrentBaseline)
    encodes_only = not recurrent and model.config.decoder is None
    translates = recurrent or model.config.is_encoder_decoder
    chats = not translates and not encodes_only and getattr(model.tokenizer, "chat_template", None) is not None
    prompt = "Hello" if chats or encodes_only else _short_prompt(samples)
    if prompt is None:
        return
    target, quoted = shlex.quote(str(folder)), shlex.quote(prompt)
    if not encodes_only:
        yield f"clearhead generate {target} {quoted}"
    if chats:
        yield f"clearhead chat {target}"
    if translates and not recurrent:
        answer = _first_line(samples[0].text.partition(" => ")[2]) or prompt
        yield f"clearhead trace {target} {shlex.quote(answer)} --source {quoted}"
    elif not recurrent:
        yield f"clearhead trace {target} {quoted}"


def _short_prompt(samples: Sequence[Sample]) -> str | None:
    """Return a prompt that can be typed in a shell: that of a sample, or else a line of a generated text."""
    candidates = [sample.prompt for sample in samples if len(sample.prompt) <= _PROMPT_CHARACTERS]
    candidates += [_first_line(sample.prompt) or _first_line(sample.text) for sample in samples]
    usable = (text for text in candidates if text.strip() and text.isprintable() and not text.startswith("-"))
    return next(usable, None)


def _first_line(text: str) -> str:
    """Return the beginning of the first line of a text that is not blank, cut after a word."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= _PROMPT_CHARACTERS else line[:_PROMPT_CHARACTERS].rpartition(" ")[0] or line[:8]


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
