"""Find tool calls in a text that arrives in pieces. Without HTTP.

    reader = TaggedReader(["now"], False, "<tool_call>", "</tool_call>"); parts = reader.push(text) + reader.finish()

A call is reported when it is complete and its arguments are a JSON object; what only looks like a call stays text.
"""

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

_DECODER = json.JSONDecoder()
_NAMED_CALL = re.compile(r"\s*([A-Za-z0-9_.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?=\{)")


@dataclass(frozen=True)
class ToolCall:
    """A function that the model asks the client to call. arguments: a JSON object as text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


Part = str | ToolCall


class ToolReader(ABC):
    """Splits one text into plain text and calls."""

    def __init__(self, names: Collection[str], at_most_one: bool):
        self._names, self._at_most_one = names, at_most_one
        self._held = ""  # text that may become a call
        self.num_calls = 0

    def push(self, text: str) -> list[Part]:
        """Return what is certain after the next piece of the text."""
        self._held += text
        return self._keep(self._split(is_end=False))

    def finish(self) -> list[Part]:
        """Return what is left at the end of the text."""
        parts = self._keep(self._split(is_end=True))
        rest, self._held = self._held, ""
        return parts + self._keep(iter([rest]))

    @abstractmethod
    def _split(self, is_end: bool) -> Iterator[Part]:
        """Yield the parts of the text that is held, and hold only the rest of it."""

    def _keep(self, parts: Iterator[Part]) -> list[Part]:
        """Return parts without space around calls; where one call is allowed, nothing after it."""
        kept: list[Part] = []
        for part in parts:
            if not part or (self.num_calls and (self._at_most_one or (isinstance(part, str) and part.isspace()))):
                continue
            self.num_calls += isinstance(part, ToolCall)
            kept.append(part)
        return kept

    def _calls(self, data: Any) -> list[ToolCall] | None:
        """Return the calls that JSON data stand for; None unless all of them are known functions with arguments."""
        calls = []
        for each in data if isinstance(data, list) else [data]:
            if not isinstance(each, dict) or each.get("name") not in self._names:
                return None
            arguments = each.get("arguments", each.get("parameters", {}))
            if isinstance(arguments, str):
                arguments = _parse(arguments)
            if not isinstance(arguments, dict):
                return None
            calls.append(ToolCall(each["name"], json.dumps(arguments, ensure_ascii=False)))
        return calls or None


class TaggedReader(ToolReader):
    """Calls between two tags."""

    def __init__(self, names: Collection[str], at_most_one: bool, begin: str, end: str):
        super().__init__(names, at_most_one)
        self._begin, self._end = begin, end

    def _split(self, is_end: bool) -> Iterator[Part]:
        while True:
            before, tag, rest = self._held.partition(self._begin)
            if not tag:
                length = len(self._held) if is_end else _num_certain(self._held, self._begin)
                certain, self._held = self._held[:length], self._held[length:]
                yield certain
                return
            found = self._read_call(rest, is_end)
            if found is None and not is_end:
                text = before.rstrip()
                self._held = self._held[len(text) :]
                yield text
                return
            if found is None:
                yield self._held  # an unfinished call
                self._held = ""
                return
            calls, length = found
            yield before.rstrip() if calls else before + tag + rest[:length]
            yield from calls
            self._held = rest[length:]

    def _read_call(self, text: str, is_end: bool) -> tuple[list[ToolCall], int] | None:
        """Return the calls before an end tag, none if it is other text, and the length of that text.

        Return None if more of the text is needed to decide.
        """
        position = -1
        while (position := text.find(self._end, position + 1)) >= 0:  # an argument may contain the end tag
            if calls := self._calls(_parse(text[:position])):
                return calls, position + len(self._end)
        if is_end and (calls := self._calls(_parse(text))):
            return calls, len(text)
        first = text.find(self._end)
        if first >= 0 and (is_end or self._is_hopeless(text[:first])):
            return [], first + len(self._end)
        return None

    def _is_hopeless(self, text: str) -> bool:
        """Return whether a text cannot be the beginning of JSON, so that waiting for another end tag is useless."""
        try:
            json.loads(text)
        except json.JSONDecodeError as error:
            return not error.msg.startswith("Unterminated string")
        return True


class MistralReader(ToolReader):
    """A marker, after which everything is calls: a list of objects, or names with arguments."""

    _marker = "[TOOL_CALLS]"

    def _split(self, is_end: bool) -> Iterator[Part]:
        before, marker, rest = self._held.partition(self._marker)
        if not marker:
            length = len(self._held) if is_end else _num_certain(self._held, self._marker)
            certain, self._held = self._held[:length], self._held[length:]
            yield certain
            return
        if not is_end:
            text = before.rstrip()
            self._held = self._held[len(text) :]
            yield text
            return
        calls = self._calls(_parse(rest)) or self._named_calls(rest)
        if calls:
            yield before.rstrip()
            yield from calls
            self._held = ""

    def _named_calls(self, text: str) -> list[ToolCall] | None:
        """Return the calls of the form name[ARGS]{...}."""
        found = []
        for each in text.split(self._marker):
            if (head := _NAMED_CALL.match(each)) is None:
                return None
            found.append({"name": head[1], "arguments": _parse(each[head.end() :])})
        return self._calls(found)


class WholeAnswerReader(ToolReader):
    """An answer that begins with { and is nothing but one or several objects, separated by semicolons."""

    _marker = "<|python_tag|>"
    _has_text = False  # whether plain text has begun

    def _split(self, is_end: bool) -> Iterator[Part]:
        start = self._held.lstrip()
        may_call = start.startswith(("{", self._marker)) or self._marker.startswith(start)
        if self._has_text or (start and not may_call):
            self._has_text = True
            text, self._held = self._held, ""
            yield text
        elif is_end and (calls := self._all_calls(start.removeprefix(self._marker))):
            self._held = ""
            yield from calls

    def _all_calls(self, text: str) -> list[ToolCall] | None:
        """Return the calls of a whole answer; None if it is anything else."""
        objects, position = [], 0
        while position < len(text):
            try:
                data, position = _DECODER.raw_decode(text, position)
            except (ValueError, RecursionError):
                return None
            objects.append(data)
            while position < len(text) and (text[position].isspace() or text[position] == ";"):
                position += 1
        return self._calls(objects)


def _parse(text: str) -> Any:
    """Return the data of a JSON text; None if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _num_certain(text: str, marker: str) -> int:
    """Return how many characters cannot belong to a marker, or to space before it."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-length:]):
            return len(text[:-length].rstrip())
    return len(text.rstrip())
