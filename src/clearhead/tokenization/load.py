"""Files to tokenizers: one function for every kind of file.

    tokenizer = load_tokenizer("model_folder")   # or a tokenizer.json, .model, .tiktoken, tokenizer.bin

A GGUF file's tokenizer is in its metadata: see `gguf_vocabulary.from_gguf`.
"""

from pathlib import Path

import tokenizers

from clearhead.errors import ClearheadError
from clearhead.files import read_bytes
from clearhead.tokenization.fast import FastTokenizer, SpecialTokens, library_errors
from clearhead.tokenization.llama2c import read_tokenizer_bin
from clearhead.tokenization.sentencepiece import build
from clearhead.tokenization.sentencepiece_file import read_model
from clearhead.tokenization.sentencepiece_normalizer import SentencePieceNormalizer
from clearhead.tokenization.settings import TokenizerSettings
from clearhead.tokenization.tiktoken import read_ranks

# In a folder, the first of these is taken; * stands for any name.
FILES = ("tokenizer.json", "tokenizer.model", "*.model", "*.tiktoken", "tokenizer.bin")


def load_tokenizer(path: str | Path) -> FastTokenizer:
    """The tokenizer of a folder or file."""
    path = Path(path)
    if path.is_dir():
        found = [file for pattern in FILES for file in sorted(path.glob(pattern))]
        if not found:
            raise ClearheadError(f"{path} holds no tokenizer; looked for {', '.join(FILES)}")
        path = found[0]
    if not path.is_file():
        raise ClearheadError(f"{path} does not exist; give a folder with a tokenizer, or a tokenizer file")
    try:
        return _load_file(path)
    except ClearheadError as error:
        raise ClearheadError(f"the tokenizer {path} cannot be loaded: {error}") from error


def _load_file(path: Path) -> FastTokenizer:
    if path.suffix == ".json":
        return _load_json(path)
    if path.suffix == ".tiktoken":
        return read_ranks(read_bytes(path), encoding=path.stem)
    if path.suffix == ".bin":
        return read_tokenizer_bin(read_bytes(path))
    if ".model" in path.suffixes:  # also such names as tokenizer.model.v3
        return _load_sentencepiece(path)
    if path.suffix == ".gguf":
        raise ClearheadError("its tokenizer is in its metadata; open it as a checkpoint")
    raise ClearheadError(f"it is none of the known kinds: {', '.join(FILES)}")


def _load_json(path: Path) -> FastTokenizer:
    content = read_bytes(path)
    with library_errors("the tokenizers library does not accept it"):
        library = tokenizers.Tokenizer.from_buffer(content)
    settings = TokenizerSettings.read(path.parent)
    special = settings.special_tokens(library.id_to_token, SpecialTokens())
    saved = settings.tokenizer_config.get("text_normalizer")
    normalizer = None if saved is None else SentencePieceNormalizer.from_saved(saved, content)
    return FastTokenizer(library, special, settings.chat_template(), normalizer)


def _load_sentencepiece(path: Path) -> FastTokenizer:
    """Where no file says how texts are framed: by bos if the model has one, otherwise by eos, as T5's."""
    vocabulary, named = read_model(read_bytes(path))
    settings = TokenizerSettings.read(path.parent)
    texts = {token_id: piece.text for token_id, piece in enumerate(vocabulary.pieces)}
    added = settings.added_tokens()
    texts |= {token_id: token.content for token_id, token in added.items()}
    special = settings.special_tokens(texts.get, named)
    adds_bos, adds_eos = settings.adds("bos"), settings.adds("eos")
    return build(
        vocabulary,
        special,
        adds_bos=special.bos is not None if adds_bos is None else adds_bos,
        adds_eos=special.bos is None and special.eos is not None if adds_eos is None else adds_eos,
        added=added,
        chat_template=settings.chat_template(),
    )
