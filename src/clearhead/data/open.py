"""A [data] table and a tokenizer to datasets.

    train, validation = open_data(TextData(path="tinyshakespeare.txt", context=256), tokenizer)

All that can be wrong with the files is found here, before training starts.
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence

from clearhead.data.config import (
    Causal,
    ChatData,
    Data,
    LongText,
    Masked,
    PairData,
    PairTable,
    ParallelFiles,
    ShardData,
    SpanCorruption,
    SyntheticData,
    TextData,
)
from clearhead.data.datasets import Chunks, Example, Examples, Packed, Windows
from clearhead.data.loader import Dataset
from clearhead.data.objectives import continuation, noise_of, supervised, translation
from clearhead.data.readers import CausalReader, MaskedReader, Reader, SpanReader
from clearhead.data.shards import open_shards
from clearhead.data.sources import Chat, Pair, read_chats, read_parallel, read_table, read_texts
from clearhead.data.synthetic import examples
from clearhead.data.tokens import Tokens, document_ids
from clearhead.errors import ClearheadError
from clearhead.tokenization import Tokenizer


def open_data(data: Data, tokenizer: Tokenizer, start: int | None = None) -> tuple[Dataset, Dataset]:
    """The datasets to train on and to validate with. A decoder reads `start` first; None: `start_id(tokenizer)`."""
    match data:
        case LongText():
            return _open_long_text(data, tokenizer, start)
        case PairData() | SyntheticData():
            train, validation = open_pairs(data)
            return _pair_examples(train, data, tokenizer, start), _pair_examples(validation, data, tokenizer, start)
        case ChatData():
            chats, held_out = _open_chats(data)
            return _chat_examples(chats, data, tokenizer), _chat_examples(held_out, data, tokenizer)


def texts_of(data: Data) -> Iterator[str]:
    """What a tokenizer for these data is trained on."""
    match data:
        case TextData():
            yield from read_texts(data.path, data.unit, data.field)
        case ShardData():
            raise ClearheadError("token shards have a tokenizer already; name the one they were written with")
        case PairData() | SyntheticData():
            for pair in open_pairs(data)[0]:
                yield from pair
        case ChatData():
            for chat in _open_chats(data)[0]:
                yield from (str(message["content"]) for message in chat)


def start_id(tokenizer: Tokenizer) -> int:
    """What a decoder reads first: the begin of text, or its end where there is none (as BART does)."""
    start = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
    if start is None:
        raise ClearheadError("the tokenizer has no begin or end of text; a decoder starts from one")
    return start


def end_id(tokenizer: Tokenizer) -> int:
    if tokenizer.eos_id is None:
        raise ClearheadError("the tokenizer has no end of text; without one, no answer would ever end")
    return tokenizer.eos_id


# --- long texts


def _open_long_text(data: LongText, tokenizer: Tokenizer, start: int | None) -> tuple[Dataset, Dataset]:
    tokens = _read_tokens(data, data.path, tokenizer)
    if data.validation_path is None:
        train, validation = tokens.split(data.validation_share)
    else:
        train, validation = tokens, _read_tokens(data, data.validation_path, tokenizer)
    training = _rows(train, data.rows, data, tokenizer, start)
    try:
        # Windows lie elsewhere in each epoch; what is validated with stays the same.
        return training, _rows(validation, "chunks" if data.rows == "windows" else data.rows, data, tokenizer, start)
    except ClearheadError as error:
        raise ClearheadError(f"for validation, {error}; validation_share or validation_path can give more") from None


def _rows(tokens: Tokens, rows: str, data: LongText, tokenizer: Tokenizer, start: int | None) -> Dataset:
    if rows == "packed":
        return Packed(tokens, data.context)
    return (Windows if rows == "windows" else Chunks)(tokens, data.context, _reader(data, tokenizer, start))


def _read_tokens(data: LongText, path: str, tokenizer: Tokenizer) -> Tokens:
    if not isinstance(data, TextData):
        return open_shards(path, tokenizer)
    texts = read_texts(path, data.unit, data.field)
    tokens = Tokens.of(document_ids(text, tokenizer) for text in texts)
    if len(tokens) == 0:
        raise ClearheadError(f"{path} is empty; there is nothing to train on")
    return tokens


def _reader(data: LongText, tokenizer: Tokenizer, start: int | None) -> Reader:
    match data.objective:
        case Causal():
            return CausalReader()
        case Masked() as masked:
            mask_id = _single_id(masked.mask_token, tokenizer)
            return MaskedReader(mask_id, tokenizer.vocab_size, tokenizer.special_ids, masked.share)
        case SpanCorruption() as spans:
            _, num_spans = noise_of(data.context, spans.share, spans.mean_length)
            sentinels = tuple(_single_id(spans.sentinel.format(number), tokenizer) for number in range(num_spans))
            start = start_id(tokenizer) if start is None else start
            return SpanReader(sentinels, start, end_id(tokenizer), spans.share, spans.mean_length)


def _single_id(token: str, tokenizer: Tokenizer) -> int:
    ids = tokenizer.encode(token, add_special_tokens=False)
    if len(ids) != 1 or ids[0] not in tokenizer.special_ids:
        raise ClearheadError(f"the tokenizer has no special token {token!r}, which the objective needs")
    return ids[0]


# --- pairs and chats


def open_pairs(data: PairData | SyntheticData) -> tuple[list[Pair], list[Pair]]:
    """The texts themselves, for training and for validation."""
    if isinstance(data, SyntheticData):
        train, held_out = (
            examples(data.task, data.min_length, data.max_length, num_examples=number, seed=data.seed, held_out=out)
            for number, out in ((data.num_examples, False), (data.num_validation, True))
        )
        return list(train), list(held_out)
    pairs = _read_pairs(data.train)
    if data.validation is not None:
        return pairs, _read_pairs(data.validation)
    # By the source's text and not by its place: several answers to one question stay together.
    held = [zlib.crc32(source.encode()) < data.validation_share * 2**32 for source, _ in pairs]
    if all(held) or not any(held):
        raise ClearheadError(f"{len(pairs)} pairs are too few to hold {data.validation_share} of them out")
    return (
        [pair for pair, out in zip(pairs, held, strict=True) if not out],
        [pair for pair, out in zip(pairs, held, strict=True) if out],
    )


def _read_pairs(files: ParallelFiles | PairTable) -> list[Pair]:
    if isinstance(files, ParallelFiles):
        return read_parallel(files.source, files.target)
    return read_table(files.path, files.source_column, files.target_column)


def _pair_examples(
    pairs: Iterable[Pair], data: PairData | SyntheticData, tokenizer: Tokenizer, start: int | None
) -> Examples:
    first, end = start_id(tokenizer) if start is None else start, end_id(tokenizer)

    def example(pair: Pair) -> Example:
        source = tokenizer.encode(pair[0])
        if data.form == "translation":
            return Example(*translation(_inside(tokenizer.encode(pair[1]), first, end), first, end), source=source)
        return Example(*continuation(source, tokenizer.encode(pair[1], add_special_tokens=False), first, end))

    rows = (row for row in map(example, pairs) if row.source != [])  # an encoder cannot read nothing
    return Examples(rows, _pad_id(tokenizer), data.context)


def _inside(ids: list[int], first: int, end: int) -> list[int]:
    """An answer without its first token and its end, where the tokenizer has put them; BART puts one more between."""
    ids = ids[1:] if ids[:1] == [first] else ids
    return ids[:-1] if ids[-1:] == [end] else ids


def _open_chats(data: ChatData) -> tuple[list[Chat], list[Chat]]:
    chats = read_chats(data.path)
    if data.validation_path is not None:
        return chats, read_chats(data.validation_path)
    border = int(len(chats) * (1 - data.validation_share))
    if border in (0, len(chats)):
        raise ClearheadError(f"{len(chats)} chats are too few to hold {data.validation_share} of them out")
    return chats[:border], chats[border:]


def _chat_examples(chats: Sequence[Chat], data: ChatData, tokenizer: Tokenizer) -> Examples:
    rows = []
    for chat in chats:
        try:
            rows.append(Example(*supervised(tokenizer, chat)))
        except ClearheadError as error:
            raise ClearheadError(f"the chat that starts {str(chat[:1])[:80]} cannot be read: {error}") from error
    return Examples(rows, _pad_id(tokenizer), data.context)


def _pad_id(tokenizer: Tokenizer) -> int:
    return 0 if tokenizer.pad_id is None else tokenizer.pad_id  # the mask says which are padding
