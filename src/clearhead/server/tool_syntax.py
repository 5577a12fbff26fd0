"""How models write tool calls: the common formats, recognized from the chat template. Without HTTP.

    syntax = find_syntax(template); parts = syntax.reader(names=["now"], at_most_one=False).push(text)

Hermes and Qwen write `<tool_call>{"name": ..., "arguments": ...}</tool_call>`, Mistral `[TOOL_CALLS]` and a list of
such objects, or in newer models `[TOOL_CALLS]name[ARGS]{...}`, and Llama 3 an object with `parameters` as the whole
answer.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any

from clearhead.server.tool_readers import (
    MistralReader,
    Part,
    TaggedReader,
    ToolReader,
    WholeAnswerReader,
)

__all__ = ["Part", "ToolReader", "ToolSyntax", "find_syntax"]

Literal = Callable[[str], str]  # a text as a part of a Lark grammar; a special token by its id


class ToolSyntax(ABC):
    """A format of calls."""

    markers: tuple[str, ...] = ()  # texts that may be special tokens of the tokenizer

    @abstractmethod
    def reader(self, names: Collection[str], at_most_one: bool) -> ToolReader:
        """Return a reader of one text; calls of functions with other names are plain text."""

    @abstractmethod
    def _call(self, name: str, literal: Literal) -> tuple[str, str]:
        """Return what comes before and after the arguments of a call."""

    def _join(self, call: str, literal: Literal, at_most_one: bool) -> str:
        """Return the rule of an answer that consists of calls."""
        return call if at_most_one else f"{call} ({literal(chr(10))} {call})*"

    def grammar(self, schemas: Mapping[str, Mapping[str, Any]], at_most_one: bool, literal: Literal) -> str:
        """Return a Lark grammar of answers that only call functions, with arguments that follow their schemas."""
        rules = [f"start: {self._join('call', literal, at_most_one)}"]
        rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(schemas))))
        for number, (name, schema) in enumerate(schemas.items()):
            before, after = self._call(name, literal)
            rules.append(f"call_{number}: {before} %json {json.dumps(schema)} {after}")
        return "\n".join(rules)


class Hermes(ToolSyntax):
    """Calls between tags, as Hermes, Qwen and SmolLM write them."""

    markers = ("<tool_call>", "</tool_call>")

    def reader(self, names: Collection[str], at_most_one: bool) -> ToolReader:
        """Return a reader of one text."""
        return TaggedReader(names, at_most_one, *self.markers)

    def _call(self, name: str, literal: Literal) -> tuple[str, str]:
        before = f"{literal('<tool_call>')} {literal(chr(10) + _head(name, 'arguments'))}"
        return before, f"{literal('}' + chr(10))} {literal('</tool_call>')}"


class Mistral(ToolSyntax):
    """A marker and a list of calls."""

    markers: tuple[str, ...] = ("[TOOL_CALLS]",)

    def reader(self, names: Collection[str], at_most_one: bool) -> ToolReader:
        """Return a reader of one text."""
        return MistralReader(names, at_most_one)

    def _call(self, name: str, literal: Literal) -> tuple[str, str]:
        return literal(_head(name, "arguments")), literal("}")

    def _join(self, call: str, literal: Literal, at_most_one: bool) -> str:
        more = "" if at_most_one else f"({literal(', ')} {call})*"
        return f"{literal('[TOOL_CALLS]')} {literal('[')} {call} {more} {literal(']')}"


class NamedMistral(Mistral):
    """For each call a marker, the name of the function, a second marker and the arguments."""

    markers = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def _call(self, name: str, literal: Literal) -> tuple[str, str]:
        return f"{literal('[TOOL_CALLS]')} {literal(name)} {literal('[ARGS]')}", ""

    def _join(self, call: str, literal: Literal, at_most_one: bool) -> str:
        return call if at_most_one else f"{call}+"


class Llama(ToolSyntax):
    """An answer that is nothing but an object, as Llama 3 writes it."""

    markers = ("<|python_tag|>",)

    def reader(self, names: Collection[str], at_most_one: bool) -> ToolReader:
        """Return a reader of one text."""
        return WholeAnswerReader(names, at_most_one)

    def _call(self, name: str, literal: Literal) -> tuple[str, str]:
        return literal(_head(name, "parameters")), literal("}")

    def _join(self, call: str, literal: Literal, at_most_one: bool) -> str:
        return call if at_most_one else f"{call} ({literal('; ')} {call})*"


def _head(name: str, key: str) -> str:
    return f'{{"name": {json.dumps(name)}, "{key}": '


def find_syntax(template: str) -> ToolSyntax | None:
    """Return the format that a chat template shows to its model; None if it has no tools, or an unknown format."""
    if "tools" not in template:
        return None
    if "<tool_call>" in template:
        return Hermes()
    if "[TOOL_CALLS]" in template:
        return NamedMistral() if "[ARGS]" in template else Mistral()
    if "<|python_tag|>" in template or '"parameters":' in template:
        return Llama()
    return None
