"""Build the training and the validation dataset from a [data] table and a tokenizer.

    train, validation = open_data(TextData(path="tinyshakespeare.txt", context=256), tokenizer)

All files are read and checked here, before training starts.
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from clearhead.data.chats import Chat
from clearhead.data.config import (
    Causal,
    ChatData,
    Data,
    LongText,
    Masked,
    PairData,
    PairTable,
    ParallelFiles,
    PreferenceData,
    ShardData,
    SpanCorruption,
    SyntheticData,
    TextData,
)
from clearhead.data.datasets import Chunks, Example, Examples, Packed, Windows
from clearhead.data.loader import Dataset
from clearhead.data.objectives import continuation, count_noise, supervised_chat, translation
from clearhead.data.preferences import Preference, Preferences, read_preferences
from clearhead.data.readers import CausalReader, MaskedReader, Reader, SpanReader
from clearhead.data.shards import open_shards
from clearhead.data.sources import Pair, read_chats, read_parallel, read_table, read_texts
from clearhead.data.synthetic import make_examples
from clearhead.data.tokens import Tokens, document_ids
from clearhead.errors import ClearheadError
from clearhead.tokenization import Tokenizer, encode_target

T = TypeVar("T")


def open_data(data: Data, tokenizer: Tokenizer, start: int | None = None) -> tuple[Dataset, Dataset]:
    """Return the training and the validation dataset.

    `start` is the id of the first token that a decoder reads; None means `decoder_start_id(tokenizer)`.
    """
    match data:
        case LongText():
            return _open_long_text(data, tokenizer, start)
        case PairData() | SyntheticData():
            train, validation = open_pairs(data)
            return _pair_examples(train, data, tokenizer, start), _pair_examples(validation, data, tokenizer, start)
        case ChatData():
            chats, held_out = _open_chats(data)
            return _chat_examples(chats, data, tokenizer), _chat_examples(held_out, data, tokenizer)
        case PreferenceData():
            train_part, validation_part = (
                Preferences(part, tokenizer, _pad_id(tokenizer), data.context) for part in _open_preferences(data)
            )
            return train_part, validation_part


def tokenizer_texts(data: Data) -> Iterator[str]:
    """Yield the training texts from which a tokenizer for this data is learned."""
    match data:
        case TextData():
            yield from read_texts(data.path, data.unit, data.field)
        case ShardData():
            raise ClearheadError("token shards already have a tokenizer; use kind = 'tokenizer_file' with its path")
        case PairData() | SyntheticData():
            for pair in open_pairs(data)[0]:
                yield from pair
        case ChatData():
            for chat in _open_chats(data)[0]:
                yield from (str(message["content"]) for message in chat)
        case PreferenceData():
            for preference in _open_preferences(data)[0]:
                chats = (preference.prompt, preference.chosen, preference.rejected)
                yield from (str(message["content"]) for chat in chats for message in chat)


def decoder_start_id(tokenizer: Tokenizer) -> int:
    """Return the id of the first token that a decoder reads: begin of text, or end of text if there is none (BART)."""
    start = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
    if start is None:
        raise ClearheadError(
            "the tokenizer has no begin-of-text or end-of-text token; a decoder needs one to start from"
        )
    return start


def _required_eos_id(tokenizer: Tokenizer) -> int:
    """Return the id of the end-of-text token. Raise ClearheadError if the tokenizer has none."""
    if tokenizer.eos_id is None:
        raise ClearheadError("the tokenizer has no end-of-text token; a decoder needs one to end its output")
    return tokenizer.eos_id


# --- long texts


def _open_long_text(data: LongText, tokenizer: Tokenizer, start: int | None) -> tuple[Dataset, Dataset]:
    tokens = _read_tokens(data, data.path, tokenizer)
    if data.validation_path is None:
        train, validation = tokens.split(data.validation_share)
    else:
        train, validation = tokens, _read_tokens(data, data.validation_path, tokenizer)
    training = _build_rows(train, data.rows, data, tokenizer, start)
    # Windows change with each epoch, but the validation rows must stay the same.
    validation_rows = "chunks" if data.rows == "windows" else data.rows
    try:
        return training, _build_rows(validation, validation_rows, data, tokenizer, start)
    except ClearheadError as error:
        raise ClearheadError(
            f"the validation data are too short: {error}; raise validation_share or set validation_path"
        ) from None


def _build_rows(tokens: Tokens, rows: str, data: LongText, tokenizer: Tokenizer, start: int | None) -> Dataset:
    if rows == "packed":
        return Packed(tokens, data.context)
    return (Windows if rows == "windows" else Chunks)(tokens, data.context, _build_reader(data, tokenizer, start))


def _read_tokens(data: LongText, path: str, tokenizer: Tokenizer) -> Tokens:
    if not isinstance(data, TextData):
        return open_shards(path, tokenizer)
    texts = read_texts(path, data.unit, data.field)
    tokens = Tokens.from_documents(document_ids(text, tokenizer) for text in texts)
    if len(tokens) == 0:
        raise ClearheadError(f"{path} is empty; training needs at least one token")
    return tokens


def _build_reader(data: LongText, tokenizer: Tokenizer, start: int | None) -> Reader:
    match data.objective:
        case Causal():
            return CausalReader()
        case Masked() as masked:
            mask_id = _special_token_id(masked.mask_token, tokenizer)
            return MaskedReader(mask_id, tokenizer.vocab_size, tokenizer.special_ids, masked.share)
        case SpanCorruption() as spans:
            _, num_spans = count_noise(data.context, spans.share, spans.mean_length)
            sentinels = tuple(
                _special_token_id(spans.sentinel.format(number), tokenizer) for number in range(num_spans)
            )
            start = decoder_start_id(tokenizer) if start is None else start
            return SpanReader(sentinels, start, _required_eos_id(tokenizer), spans.share, spans.mean_length)


def _special_token_id(token: str, tokenizer: Tokenizer) -> int:
    ids = tokenizer.encode(token, add_special_tokens=False)
    if len(ids) != 1 or ids[0] not in tokenizer.special_ids:
        raise ClearheadError(f"the tokenizer has no special token {token!r}, which data.objective needs")
    return ids[0]


# --- pairs and chats


def open_pairs(data: PairData | SyntheticData) -> tuple[list[Pair], list[Pair]]:
    """Return the pairs of texts for training and for validation."""
    if isinstance(data, SyntheticData):
        train, held_out = (
            make_examples(
                data.task, data.min_length, data.max_length, num_examples=number, seed=data.seed, held_out=out
            )
            for number, out in ((data.num_examples, False), (data.num_validation, True))
        )
        return list(train), list(held_out)
    pairs = _read_pairs(data.train)
    if data.validation is not None:
        return pairs, _read_pairs(data.validation)
    # Decided by a hash of the source, so that all targets of one source are on the same side.
    is_held_out = [zlib.crc32(source.encode()) < data.validation_share * 2**32 for source, _ in pairs]
    if all(is_held_out) or not any(is_held_out):
        raise ClearheadError(
            f"{len(pairs)} pairs are too few to hold out a share of {data.validation_share}; set data.validation"
        )
    return (
        [pair for pair, out in zip(pairs, is_held_out, strict=True) if not out],
        [pair for pair, out in zip(pairs, is_held_out, strict=True) if out],
    )


def _read_pairs(files: ParallelFiles | PairTable) -> list[Pair]:
    if isinstance(files, ParallelFiles):
        return read_parallel(files.source, files.target)
    return read_table(files.path, files.source_column, files.target_column, files.header)


def _pair_examples(
    pairs: Iterable[Pair], data: PairData | SyntheticData, tokenizer: Tokenizer, start: int | None
) -> Examples:
    first, end = decoder_start_id(tokenizer) if start is None else start, _required_eos_id(tokenizer)

    def example(pair: Pair) -> Example:
        source = tokenizer.encode(pair[0])
        if data.form == "continuation":
            return Example(*continuation(source, tokenizer.encode(pair[1], add_special_tokens=False), first, end))
        target = _strip_added_tokens(encode_target(pair[1], tokenizer), first, end)
        return Example(*translation(target, first, end), source=source)

    rows = (row for row in map(example, pairs) if row.source != [])  # an encoder needs at least one token
    return Examples(rows, _pad_id(tokenizer), data.context)


def _strip_added_tokens(ids: list[int], first: int, end: int) -> list[int]:
    """Remove the start and end tokens that the tokenizer added. BART adds one more token after the start; it stays."""
    ids = ids[1:] if ids[:1] == [first] else ids
    return ids[:-1] if ids[-1:] == [end] else ids


def _open_chats(data: ChatData) -> tuple[list[Chat], list[Chat]]:
    chats = read_chats(data.path)
    if data.validation_path is not None:
        return chats, read_chats(data.validation_path)
    return _hold_out(chats, data.validation_share, "chats")


def _open_preferences(data: PreferenceData) -> tuple[list[Preference], list[Preference]]:
    preferences = read_preferences(data.path)
    if data.validation_path is not None:
        return preferences, read_preferences(data.validation_path)
    return _hold_out(preferences, data.validation_share, "preferences")


def _hold_out(rows: list[T], share: float, kind: str) -> tuple[list[T], list[T]]:
    """Return the first rows for training and the last for validation."""
    border = int(len(rows) * (1 - share))
    if border in (0, len(rows)):
        raise ClearheadError(f"{len(rows)} {kind} are too few to hold out a share of {share}; set data.validation_path")
    return rows[:border], rows[border:]


def _chat_examples(chats: Sequence[Chat], data: ChatData, tokenizer: Tokenizer) -> Examples:
    rows = []
    for chat in chats:
        try:
            rows.append(Example(*supervised_chat(tokenizer, chat)))
        except ClearheadError as error:
            raise ClearheadError(f"the chat that starts with {str(chat[:1])[:80]} cannot be used: {error}") from error
    return Examples(rows, _pad_id(tokenizer), data.context)


def _pad_id(tokenizer: Tokenizer) -> int:
    return 0 if tokenizer.pad_id is None else tokenizer.pad_id  # any id works: the mask excludes padding
