"""Turn the usual formats of instruction data into chats.

to_messages({"instruction": "Translate to French.", "input": "a cat", "output": "un chat"}, "line 1")

    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}     OpenAI, Hugging Face
    {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}         ShareGPT
    {"instruction": ..., "input": ..., "output": ...}                                           Alpaca
    {"prompt": ..., "completion": ...}, and other pairs of a question and an answer
"""

from collections.abc import Mapping, Sequence
from typing import Any

from clearhead.errors import ClearheadError

Chat = Sequence[Mapping[str, object]]

_QUESTIONS = ("instruction", "prompt", "question")
_ANSWERS = ("output", "completion", "response", "answer")
_ROLES = {"human": "user", "gpt": "assistant"}  # the names of ShareGPT; others stay


def to_messages(entry: Mapping[str, Any], where: str) -> Chat:
    """Return the messages of an entry. Raise ClearheadError, which starts with `where`, if it has none."""
    if "messages" in entry:
        return check_messages(entry["messages"], where, "messages")
    if "conversations" in entry:
        turns = entry["conversations"]
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            raise ClearheadError(f'{where} needs "conversations": a list of objects with "from" and "value"')
        named = [{"role": _ROLES.get(str(turn.get("from")), turn.get("from")), **_content(turn)} for turn in turns]
        return check_messages(named, where, "conversations")
    question = next((name for name in _QUESTIONS if name in entry), None)
    answer = next((name for name in _ANSWERS if name in entry), None)
    if question is None or answer is None:
        raise ClearheadError(
            f'{where} needs "messages": a list of objects with a role and a content; or a question '
            f"({', '.join(_QUESTIONS)}) and an answer ({', '.join(_ANSWERS)}); its keys are: {', '.join(entry)}"
        )
    texts = [entry[question], entry.get("input") or "", entry[answer], entry.get("system") or ""]
    if not all(isinstance(text, str) for text in texts):
        raise ClearheadError(f"{where} must have texts under {question!r} and {answer!r}")
    asked = "\n\n".join(text for text in texts[:2] if text)
    system = [{"role": "system", "content": texts[3]}] if texts[3] else []
    return [*system, {"role": "user", "content": asked}, {"role": "assistant", "content": texts[2]}]


def _content(turn: Mapping[str, Any]) -> dict[str, Any]:
    return {"content": turn["value"]} if "value" in turn else {}


def check_messages(messages: object, where: str, key: str) -> Chat:
    """Return the messages. Raise ClearheadError if one of them has no role or no content."""
    if isinstance(messages, list) and all(_is_message(message) for message in messages):
        return messages
    raise ClearheadError(f'{where} needs "{key}": a list of objects with a role and a content')


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message
