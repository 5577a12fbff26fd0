"""Text to token ids and back; no module here imports torch.

    tokenizer = load_tokenizer("model_folder"); ids = tokenizer.encode("Hello!")

    interface                  Tokenizer, the protocol; StreamDecoder, from a stream of ids to text
    library_tokenizer          LibraryTokenizer, which runs the `tokenizers` library
    load                       tokenizers from folders and files
    gguf_vocabulary, gguf_writing
                               tokenizers from and to the metadata of GGUF files
    merge_files                byte-level tokenizers from vocab.json and merges.txt
    marian                     the tokenizer of Marian models, from Hugging Face's or CTranslate2's files
    llama2c, tiktoken          tokenizers from tokenizer.bin and from rank files
    sentencepiece, sentencepiece_file, sentencepiece_normalizer, character_map
                               SentencePiece vocabularies: building, reading, normalizing text
    byte_level, pre_tokenization
                               byte-level vocabularies, and the patterns that split text before merging
    tokenizer_limits           what a tokenizer file may ask of the library
    pairs                      one or two texts for an encoder, cut to a length
    settings                   tokenizer_config.json and the other small files beside a tokenizer
    characters, train          tokenizers of bytes or characters; learning a vocabulary from texts
    chat_template              render_chat: from messages to a prompt
    conversation               messages from and to a file
    template_sandbox, template_compiler, template_filters, template_text, template_limits
                               run an untrusted chat template within limits

Names are imported on first use, so that the protocol can be imported without the `tokenizers` library.
"""

from typing import TYPE_CHECKING

from clearhead.lazy_imports import lazy_exports

if TYPE_CHECKING:
    from clearhead.tokenization.characters import byte_tokenizer
    from clearhead.tokenization.chat_template import render_chat
    from clearhead.tokenization.conversation import read_conversation, write_conversation
    from clearhead.tokenization.gguf_vocabulary import tokenizer_from_gguf
    from clearhead.tokenization.gguf_writing import tokenizer_to_gguf
    from clearhead.tokenization.interface import StreamDecoder, Tokenizer
    from clearhead.tokenization.library_tokenizer import SpecialTokens
    from clearhead.tokenization.load import load_tokenizer
    from clearhead.tokenization.marian import (
        CTRANSLATE2_VOCABULARY,
        encode_target,
        find_marian_files,
        load_marian_tokenizer,
        read_marian_vocabulary,
    )
    from clearhead.tokenization.merge_files import has_merge_files
    from clearhead.tokenization.pairs import EncodedText, encode_pair
    from clearhead.tokenization.train import train_tokenizer

__all__ = [
    "CTRANSLATE2_VOCABULARY",
    "EncodedText",
    "SpecialTokens",
    "StreamDecoder",
    "Tokenizer",
    "byte_tokenizer",
    "encode_pair",
    "encode_target",
    "find_marian_files",
    "has_merge_files",
    "load_marian_tokenizer",
    "load_tokenizer",
    "read_conversation",
    "read_marian_vocabulary",
    "render_chat",
    "tokenizer_from_gguf",
    "tokenizer_to_gguf",
    "train_tokenizer",
    "write_conversation",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "characters": ["byte_tokenizer"],
        "chat_template": ["render_chat"],
        "conversation": ["read_conversation", "write_conversation"],
        "gguf_vocabulary": ["tokenizer_from_gguf"],
        "gguf_writing": ["tokenizer_to_gguf"],
        "interface": ["StreamDecoder", "Tokenizer"],
        "library_tokenizer": ["SpecialTokens"],
        "load": ["load_tokenizer"],
        "marian": [
            "CTRANSLATE2_VOCABULARY",
            "encode_target",
            "find_marian_files",
            "load_marian_tokenizer",
            "read_marian_vocabulary",
        ],
        "merge_files": ["has_merge_files"],
        "pairs": ["EncodedText", "encode_pair"],
        "train": ["train_tokenizer"],
    },
)
