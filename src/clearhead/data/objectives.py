"""What is asked of the network: ids to inputs and targets. Pure functions; chance comes in as a key.

causal(np.array([[5, 6, 7]]))                          # reads 5 6, is asked for 6 7
translation([5, 6], start=1, end=2)                    # the decoder reads 1 5 6, is asked for 5 6 2
masked(ids, keys, mask_id=4, vocab_size=99, special_ids={4})
span_corruption(ids, key, sentinels=[32099, 32098], end=1)
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from clearhead.data.batch import IGNORED
from clearhead.data.counter_random import Ids, Numbers, numbers, shuffled, uniform
from clearhead.errors import ClearheadError
from clearhead.tokenization import Tokenizer, render_chat


def causal(ids: Ids) -> tuple[Ids, Ids]:
    """The shift by one (book D1): (..., T + 1) -> what is read and what comes next, (..., T) each."""
    return ids[..., :-1], ids[..., 1:]


def translation(target: Sequence[int], start: int, end: int) -> tuple[list[int], list[int]]:
    """Teacher forcing (book D3): the decoder reads the right answer one place late."""
    return [start, *target], [*target, end]


def continuation(source: Sequence[int], target: Sequence[int], start: int, end: int) -> tuple[list[int], list[int]]:
    """The same for a network without an encoder, which reads the source first and is not asked for it."""
    inputs, targets = translation(target, start, end)
    return [*source, *inputs], [IGNORED] * len(source) + targets


def masked(
    ids: Ids, keys: Numbers, mask_id: int, vocab_size: int, special_ids: Collection[int], share: float = 0.15
) -> tuple[Ids, Ids]:
    """Tokens to be guessed from both sides (Devlin et al. 2018, §3.1): (B, T) -> inputs and targets (B, T).

    Of the places asked for, 80 % show the mask, 10 % a random token and 10 % the token itself. Special tokens are
    never asked for. A row where chance asks for nothing is asked for one token, if it has any.
    """
    askable = ~np.isin(ids, list(special_ids))
    chances = np.where(askable, uniform(keys, ids.shape[-1]), 1.0)
    least = chances == chances.min(axis=-1, keepdims=True)
    asked = askable & ((chances < share) | least)
    how_keys, token_keys = numbers(keys, 2**32), numbers(keys, 2**32 + 1)  # beyond the numbers of any place
    how = uniform(how_keys, ids.shape[-1])
    anything = numbers(token_keys[..., None], np.arange(ids.shape[-1])) % np.uint64(vocab_size)
    shown = np.where(how < 0.8, mask_id, np.where(how < 0.9, anything.astype(np.int64), ids))
    return np.where(asked, shown, ids), np.where(asked, ids, IGNORED)


def span_corruption(
    ids: Ids, key: Numbers, sentinels: Sequence[int], end: int, share: float = 0.15, mean_length: float = 3.0
) -> tuple[Ids, Ids]:
    """Spans replaced by sentinels, to be told in order (Raffel et al. 2020, §3.1.4): ids (T,) -> inputs and answer.

    Thank you for inviting me to your party last week
    inputs:  Thank you <X> me to your party <Y> week </s>
    answer:  <X> for inviting <Y> last </s>
    """
    num_noise, num_spans = noise_of(len(ids), share, mean_length)
    if num_spans > len(sentinels):
        raise ClearheadError(f"{len(ids)} tokens take {num_spans} sentinels; the tokenizer has {len(sentinels)}")
    noise = _parts(numbers(key, 0), num_noise, num_spans)
    kept = _parts(numbers(key, 1), len(ids) - num_noise, num_spans)
    inputs: list[int] = []
    answer: list[int] = []
    start = 0
    for sentinel, num_kept, num_hidden in zip(sentinels, kept, noise, strict=False):
        hidden, stop = start + num_kept, start + num_kept + num_hidden
        inputs += [*ids[start:hidden], sentinel]
        answer += [sentinel, *ids[hidden:stop]]
        start = stop
    return np.array([*inputs, end]), np.array([*answer, end])


def noise_of(num_tokens: int, share: float = 0.15, mean_length: float = 3.0) -> tuple[int, int]:
    """How many of a row's tokens are hidden, and in how many spans."""
    num_noise = min(max(round(num_tokens * share), 1), num_tokens - 1)
    return num_noise, min(max(round(num_noise / mean_length), 1), num_noise, num_tokens - num_noise)


def span_lengths(num_tokens: int, share: float, mean_length: float) -> tuple[int, int]:
    """Tokens of the inputs and of the answer: each has a sentinel for each span, and an end."""
    num_noise, num_spans = noise_of(num_tokens, share, mean_length)
    return num_tokens - num_noise + num_spans + 1, num_noise + num_spans + 1


def _parts(key: Numbers, total: int, count: int) -> Ids:
    """`total` cut at random into `count` parts of at least one."""
    borders = np.sort(shuffled(key, total - 1)[: count - 1]) + 1
    return np.diff(np.concatenate([[0], borders, [total]]))


def supervised(tokenizer: Tokenizer, messages: Sequence[Mapping[str, object]]) -> tuple[list[int], list[int]]:
    """A chat in its template, of which the assistant's words and the end of its turn are asked for: inputs, targets.

    Every answer is cut where generation would start and stop, so that the network reads in training what it will
    read then. A chat may open with words of the assistant: they answer nothing, and are only read.
    """
    ids: list[int] = []
    asked: list[bool] = []
    written = ""
    for number, message in enumerate(messages):
        if message.get("role") != "assistant" or number == 0:
            continue
        prompt = render_chat(tokenizer, messages[:number], add_generation_prompt=True)
        answered = render_chat(tokenizer, messages[: number + 1], add_generation_prompt=False)
        if not (prompt.startswith(written) and answered.startswith(prompt)):
            raise ClearheadError("the chat template rewrites earlier turns; give chats with one answer each")
        question = _added(tokenizer, ids, prompt, len(written))
        answer = _added(tokenizer, ids + question, answered, len(prompt))
        stops = [place for place, token in enumerate(answer, start=1) if token in tokenizer.stop_ids]
        ids += question + answer
        asked += [False] * len(question) + [place < (stops or [len(answer)])[-1] for place in range(len(answer))]
        written = answered
    if not any(asked):
        raise ClearheadError("the chat has no answer of the assistant, so that nothing is asked")
    return ids[:-1], [token if ask else IGNORED for token, ask in zip(ids[1:], asked[1:], strict=True)]


def _added(tokenizer: Tokenizer, ids: list[int], text: str, start: int) -> list[int]:
    """What the text from `start` on adds to the ids of what comes before it.

    As the whole is divided, since some tokenizers put a space before what they take for a beginning; apart only where
    a token of the whole would reach over the border, which generation keeps.
    """
    whole = tokenizer.encode(text, add_special_tokens=False)
    return whole[len(ids) :] if whole[: len(ids)] == ids else tokenizer.encode(text[start:], add_special_tokens=False)
