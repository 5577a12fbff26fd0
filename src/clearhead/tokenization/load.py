"""Load a tokenizer from a folder or from any supported file.

    tokenizer = load_tokenizer("model_folder")   # or a tokenizer.json, .model, .tiktoken, tokenizer.bin

A GGUF file stores its tokenizer in its metadata: see `gguf_vocabulary.tokenizer_from_gguf`.
"""

from collections.abc import Callable
from pathlib import Path

import tokenizers

from clearhead.errors import ClearheadError
from clearhead.files import read_bytes
from clearhead.tokenization.library_tokenizer import LibraryTokenizer, SpecialTokens, convert_library_errors
from clearhead.tokenization.llama2c import read_tokenizer_bin
from clearhead.tokenization.merge_files import has_merge_files, load_merge_files
from clearhead.tokenization.sentencepiece import build_sentencepiece_tokenizer
from clearhead.tokenization.sentencepiece_file import read_sentencepiece_model
from clearhead.tokenization.sentencepiece_normalizer import SentencePieceNormalizer
from clearhead.tokenization.settings import TokenizerSettings
from clearhead.tokenization.tiktoken import read_rank_file
from clearhead.tokenization.tokenizer_limits import parse_tokenizer_json

# The first of these that a folder contains is loaded; * stands for any name.
FILES = ("tokenizer.json", "tokenizer.model", "*.model", "*.tiktoken", "tokenizer.bin")


def load_tokenizer(path: str | Path) -> LibraryTokenizer:
    """Return the tokenizer in a folder or file; raise ClearheadError if there is none or it cannot be read."""
    path = Path(path)
    if path.is_dir():
        found = [file for pattern in FILES for file in sorted(path.glob(pattern))]
        if not (path / FILES[0]).is_file() and has_merge_files(path):
            return _explain_errors(path, load_merge_files)
        if not found:
            raise ClearheadError(
                f"{path} contains no tokenizer; it must contain one of these files: {', '.join(FILES)}"
            )
        path = found[0]
    if not path.is_file():
        raise ClearheadError(f"{path} does not exist; give a folder with a tokenizer, or a tokenizer file")
    return _explain_errors(path, _load_file)


def _explain_errors(path: Path, load: Callable[[Path], LibraryTokenizer]) -> LibraryTokenizer:
    try:
        return load(path)
    except ClearheadError as error:
        raise ClearheadError(
            f"the tokenizer {path} cannot be loaded: {error}; download the model again, or give another tokenizer"
        ) from error


def _load_file(path: Path) -> LibraryTokenizer:
    if path.suffix == ".json":
        return _load_json(path)
    if path.suffix == ".tiktoken":
        return read_rank_file(read_bytes(path), encoding=path.stem)
    if path.suffix == ".bin":
        return read_tokenizer_bin(read_bytes(path))
    if ".model" in path.suffixes:  # includes names such as tokenizer.model.v3
        return _load_sentencepiece(path)
    if path.suffix == ".gguf":
        raise ClearheadError("a GGUF file stores its tokenizer in its metadata; load the file as a checkpoint")
    raise ClearheadError(f"its file type is not supported; the supported files are: {', '.join(FILES)}")


def _load_json(path: Path) -> LibraryTokenizer:
    content = read_bytes(path)
    saved_normalizer = parse_tokenizer_json(content).get("normalizer")  # the rest takes ten times the file's memory
    with convert_library_errors("the tokenizers library does not accept it"):
        library = tokenizers.Tokenizer.from_buffer(content)
    settings = TokenizerSettings.read(path.parent)
    special = settings.special_tokens(library.id_to_token, SpecialTokens())
    saved = settings.tokenizer_config.get("text_normalizer")
    normalizer = None if saved is None else SentencePieceNormalizer.from_saved(saved, saved_normalizer)
    return LibraryTokenizer(library, special, settings.chat_template(), normalizer)


def _load_sentencepiece(path: Path) -> LibraryTokenizer:
    """Load a SentencePiece model.

    If no file says which special tokens are added to a text, it is bos if the model has one, else eos, as for T5.
    """
    vocabulary, model_special = read_sentencepiece_model(read_bytes(path))
    settings = TokenizerSettings.read(path.parent)
    texts = {token_id: piece.text for token_id, piece in enumerate(vocabulary.pieces)}
    added = settings.added_tokens()
    texts |= {token_id: token.content for token_id, token in added.items()}
    special = settings.special_tokens(texts.get, model_special)
    adds_bos, adds_eos = settings.adds_token("bos"), settings.adds_token("eos")
    return build_sentencepiece_tokenizer(
        vocabulary,
        special,
        adds_bos=special.bos is not None if adds_bos is None else adds_bos,
        adds_eos=special.bos is None and special.eos is not None if adds_eos is None else adds_eos,
        added=added,
        chat_template=settings.chat_template(),
    )
