"""Turn token ids into inputs and targets. All functions are pure; randomness comes in as a key.

causal(np.array([[5, 6, 7]]))                          # inputs 5 6, targets 6 7
translation([5, 6], start=1, end=2)                    # decoder inputs 1 5 6, targets 5 6 2
masked(ids, keys, mask_id=4, vocab_size=99, special_ids={4})
span_corruption(ids, key, sentinels=[32099, 32098], end=1)
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from clearhead.data.batch import IGNORED
from clearhead.data.counter_random import Ids, Keys, permutation, random_integers, uniform
from clearhead.errors import ClearheadError
from clearhead.tokenization import Tokenizer, render_chat


def causal(ids: Ids) -> tuple[Ids, Ids]:
    """Shift by one position (book D1): (..., T + 1) -> inputs and the tokens that follow them, (..., T) each."""
    return ids[..., :-1], ids[..., 1:]


def translation(target: Sequence[int], start: int, end: int) -> tuple[list[int], list[int]]:
    """Return decoder inputs and targets for teacher forcing (book D3): the inputs are the targets one step earlier."""
    return [start, *target], [*target, end]


def continuation(source: Sequence[int], target: Sequence[int], start: int, end: int) -> tuple[list[int], list[int]]:
    """Return inputs and targets of a translation by a decoder-only network. The source comes first, without targets."""
    inputs, targets = translation(target, start, end)
    return [*source, *inputs], [IGNORED] * len(source) + targets


def masked(
    ids: Ids, keys: Keys, mask_id: int, vocab_size: int, special_ids: Collection[int], share: float = 0.15
) -> tuple[Ids, Ids]:
    """Return inputs and targets of masked language modeling (Devlin et al. 2018, §3.1): (B, T) -> (B, T) each.

    A `share` of the tokens are targets. Of these, 80 % are replaced by the mask, 10 % by a random token, and 10 % stay.
    Special tokens are never targets. Every row gets at least one target if it has an ordinary token.
    """
    maskable = ~np.isin(ids, list(special_ids))
    random_values = np.where(maskable, uniform(keys, ids.shape[-1]), 1.0)
    lowest = random_values == random_values.min(axis=-1, keepdims=True)
    is_target = maskable & ((random_values < share) | lowest)
    # Two more keys for each row, at indices beyond those of any position.
    choice_keys, token_keys = random_integers(keys, 2**32), random_integers(keys, 2**32 + 1)
    choice = uniform(choice_keys, ids.shape[-1])
    random_tokens = random_integers(token_keys[..., None], np.arange(ids.shape[-1])) % np.uint64(vocab_size)
    replaced = np.where(choice < 0.8, mask_id, np.where(choice < 0.9, random_tokens.astype(np.int64), ids))
    return np.where(is_target, replaced, ids), np.where(is_target, ids, IGNORED)


def span_corruption(
    ids: Ids, key: Keys, sentinels: Sequence[int], end: int, share: float = 0.15, mean_length: float = 3.0
) -> tuple[Ids, Ids]:
    """Replace random spans by sentinels (Raffel et al. 2020, §3.1.4): ids (T,) -> inputs and answer.

    text:    Thank you for inviting me to your party last week
    inputs:  Thank you <X> me to your party <Y> week </s>
    answer:  <X> for inviting <Y> last </s>
    """
    num_noise, num_spans = count_noise(len(ids), share, mean_length)
    if num_spans > len(sentinels):
        raise ClearheadError(
            f"span corruption of {len(ids)} tokens needs {num_spans} sentinels, but the tokenizer has only "
            f"{len(sentinels)}; lower data.context or use a tokenizer with more sentinels"
        )
    noise_lengths = _random_partition(random_integers(key, 0), num_noise, num_spans)
    kept_lengths = _random_partition(random_integers(key, 1), len(ids) - num_noise, num_spans)
    inputs: list[int] = []
    answer: list[int] = []
    start = 0
    for sentinel, num_kept, num_hidden in zip(sentinels, kept_lengths, noise_lengths, strict=False):
        hidden, stop = start + num_kept, start + num_kept + num_hidden
        inputs += [*ids[start:hidden], sentinel]
        answer += [sentinel, *ids[hidden:stop]]
        start = stop
    return np.array([*inputs, end]), np.array([*answer, end])


def count_noise(num_tokens: int, share: float = 0.15, mean_length: float = 3.0) -> tuple[int, int]:
    """Return the number of tokens that span corruption hides, and the number of spans."""
    num_noise = min(max(round(num_tokens * share), 1), num_tokens - 1)
    return num_noise, min(max(round(num_noise / mean_length), 1), num_noise, num_tokens - num_noise)


def span_corruption_lengths(num_tokens: int, share: float, mean_length: float) -> tuple[int, int]:
    """Return the lengths of the inputs and the answer; both contain a sentinel for each span and an end token."""
    num_noise, num_spans = count_noise(num_tokens, share, mean_length)
    return num_tokens - num_noise + num_spans + 1, num_noise + num_spans + 1


def _random_partition(key: Keys, total: int, count: int) -> Ids:
    """Cut `total` at random into `count` lengths of at least one."""
    borders = np.sort(permutation(key, total - 1)[: count - 1]) + 1
    return np.diff(np.concatenate([[0], borders, [total]]))


def supervised_chat(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, object]], first_answer: int = 0
) -> tuple[list[int], list[int]]:
    """Render a chat with its template and return inputs and targets.

    Messages before number `first_answer` are inputs only.

    The targets are the assistant's messages, each with its stop token. The text is cut where generation would start
    and stop, so that the network sees in training the same tokens as in generation. An assistant message at the start
    of the chat answers nothing, so it is input only.
    """
    ids: list[int] = []
    is_target: list[bool] = []
    rendered = ""
    for number, message in enumerate(messages):
        if message.get("role") != "assistant" or number == 0:
            continue
        prompt = render_chat(tokenizer, messages[:number], add_generation_prompt=True)
        with_answer = render_chat(tokenizer, messages[: number + 1], add_generation_prompt=False)
        if not (prompt.startswith(rendered) and with_answer.startswith(prompt)):
            raise ClearheadError("the chat template rewrites earlier messages; use chats with one answer each")
        question = _encode_rest(tokenizer, ids, prompt, len(rendered))
        answer = _encode_rest(tokenizer, ids + question, with_answer, len(prompt))
        stops = [length for length, token in enumerate(answer, start=1) if token in tokenizer.stop_ids]
        num_targets = stops[-1] if stops else len(answer)
        ids += question + answer
        is_target += [False] * len(question) + [
            number >= first_answer and index < num_targets for index in range(len(answer))
        ]
        rendered = with_answer
    if not any(is_target):
        raise ClearheadError("the chat has no assistant message after another message, so it has no targets")
    return ids[:-1], [token if asked else IGNORED for token, asked in zip(ids[1:], is_target[1:], strict=True)]


def _encode_rest(tokenizer: Tokenizer, ids: list[int], text: str, start: int) -> list[int]:
    """Return the ids of text[start:], given the `ids` of text[:start].

    Encode the whole text and take what follows `ids`, because some tokenizers put a space before the start of a text.
    If a token would cross the border, encode the rest alone, as generation does.
    """
    all_ids = tokenizer.encode(text, add_special_tokens=False)
    if all_ids[: len(ids)] == ids:
        return all_ids[len(ids) :]
    return tokenizer.encode(text[start:], add_special_tokens=False)
