"""Build what a recipe describes: tokenizer, datasets and network.

setup = prepare(recipe, Path("runs/x"), resumed=False); setup.network, setup.train_data, setup.validation_data
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from clearhead.api import load
from clearhead.architecture import ModelConfig
from clearhead.catalog import dataset_names, find_installed
from clearhead.config import from_dict, kind_of, to_dict
from clearhead.data import (
    Data,
    Dataset,
    Examples,
    LongText,
    Masked,
    PairData,
    Preferences,
    SpanCorruption,
    SyntheticData,
    count_noise,
    decoder_start_id,
    open_data,
    span_corruption_lengths,
    tokenizer_texts,
)
from clearhead.errors import ClearheadError
from clearhead.families import Family
from clearhead.model import RecurrentConfig, RecurrentTranslator, Transformer
from clearhead.tokenization import SpecialTokens, Tokenizer, byte_tokenizer, load_tokenizer, train_tokenizer
from clearhead.training.models import LoadedModel, build_model_config
from clearhead.training.objective import Network
from clearhead.training.overrides import expand_keywords, flatten, merge_tables
from clearhead.training.recipe import (
    ByteTokenizer,
    CharacterTokenizer,
    LearnedTokenizer,
    Recipe,
    TokenizerFile,
)

NetworkKind = Literal["a decoder", "an encoder", "an encoder-decoder"]
PAIR_SPECIAL_TOKENS = SpecialTokens(bos="<s>", eos="</s>", pad="<pad>", unknown="<unk>")
_PATH_KEYS = ("path", "validation_path", "source", "target")  # keys of [data] and [tokenizer] that name files


@dataclass(frozen=True)
class Setup:
    """The network and the data of a run."""

    network: Network
    tokenizer: Tokenizer
    train_data: Dataset
    validation_data: Dataset
    family: Family | None
    special_ids: dict[str, Any]

    @property
    def num_too_long(self) -> int:
        """Number of training and validation examples that were dropped because they exceed the context."""
        datasets = (self.train_data, self.validation_data)
        return sum(dataset.num_too_long for dataset in datasets if isinstance(dataset, Examples | Preferences))


def prepare(recipe: Recipe, folder: Path, resumed: bool) -> Setup:
    """Build the network and open the data. Raise ClearheadError if the recipe or its files cannot be used."""
    recipe = _locate_files(recipe, resumed)
    if isinstance(recipe.model, LoadedModel):
        setup = _prepare_loaded_model(recipe, recipe.model)
    else:
        setup = _prepare_new_model(recipe, folder, resumed)
    if isinstance(setup.network, Transformer):
        # No objective uses the pooler and the classifier, and DDP fails if a trained weight gets no gradient.
        for part in (setup.network.pooler, setup.network.classifier):
            if part is not None:
                part.requires_grad_(False)
    return setup


def _locate_files(recipe: Recipe, resumed: bool) -> Recipe:
    """Return the recipe with the paths of installed data sets in place of their names.

    Raise ClearheadError if a file is missing. The readers could not name the key of the recipe.
    """
    table = to_dict(recipe)
    tables = {"data"} if resumed else {"data", "tokenizer"}  # a resumed run loads the tokenizer from its own folder
    for name, value in flatten({key: value for key, value in table.items() if key in tables}).items():
        if name.rpartition(".")[2] in _PATH_KEYS and not Path(value).exists():
            table = merge_tables(table, expand_keywords({name: _find_data(name, value)}))
    return from_dict(Recipe, table)


def _find_data(key: str, name: str) -> Path:
    """Return the path of an installed data set. Raise ClearheadError if there is none of this name."""
    if name not in dataset_names():
        raise ClearheadError(
            f"{key} {name} does not exist; this recipe needs a file of your own: give it as --{key}; docs/training.md "
            "says what it contains"
        )
    path = find_installed(name)
    if path is None:
        raise ClearheadError(f"{key} {name} is a data set that is not installed; run `clearhead get {name}` first")
    return path


def _prepare_new_model(recipe: Recipe, folder: Path, resumed: bool) -> Setup:
    """Build a network with new weights, and its tokenizer. A resumed run loads its tokenizer from its folder."""
    tokenizer = load_tokenizer(folder / "tokenizer") if resumed else _build_tokenizer(recipe)
    config = build_model_config(recipe.model, tokenizer.vocab_size)
    _check_network_kind(recipe.data, config)
    _check_context(recipe.data, config.context)
    _check_memory(config)
    train_data, validation_data = open_data(recipe.data, tokenizer)
    torch.manual_seed(recipe.train.seed)
    network = _build_network(config)
    special_ids = {} if tokenizer.eos_id is None else {"eos_token_id": tokenizer.eos_id}
    if isinstance(config, RecurrentConfig) or config.is_encoder_decoder:
        special_ids["decoder_start_token_id"] = decoder_start_id(tokenizer)
    return Setup(network, tokenizer, train_data, validation_data, None, special_ids)


def _build_network(config: ModelConfig | RecurrentConfig) -> Network:
    return RecurrentTranslator(config) if isinstance(config, RecurrentConfig) else Transformer(config)


def _check_memory(config: ModelConfig | RecurrentConfig) -> None:
    """Raise ClearheadError if the weights of a new network are larger than the memory of this machine."""
    try:
        with torch.device("meta"):
            network = _build_network(config)
    except (RuntimeError, OverflowError):  # torch cannot count the elements of such a tensor
        raise ClearheadError("the model is too large; lower model.width, model.context or the vocabulary") from None
    num_bytes = sum(weight.nbytes for weight in (*network.parameters(), *network.buffers()))
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if num_bytes > memory_bytes:
        raise ClearheadError(
            f"the weights of the model take {num_bytes / 1e9:,.0f} GB, but this machine has {memory_bytes / 1e9:,.0f}"
            " GB of memory; lower model.width or model.num_layers"
        )


def _prepare_loaded_model(recipe: Recipe, choice: LoadedModel) -> Setup:
    """Load a saved model with its tokenizer."""
    model = load(choice.name, dtype="float32", fast=False)
    if model.tokenizer is None:
        raise ClearheadError(f"{choice.name} has no tokenizer; training needs one to read the data")
    _check_network_kind(recipe.data, model.config)
    _check_context(recipe.data, model.config.context)
    _check_vocabulary(choice.name, model.tokenizer, model.config)
    start = model.special_ids.get("decoder_start_token_id")
    train_data, validation_data = open_data(recipe.data, model.tokenizer, start)
    network = model.network
    if choice.dropout is not None:
        network = Transformer(replace(model.config, dropout=choice.dropout))
        network.load_state_dict(model.network.state_dict())
    torch.manual_seed(recipe.train.seed)
    return Setup(network, model.tokenizer, train_data, validation_data, model.family, model.special_ids)


def _check_vocabulary(name: str, tokenizer: Tokenizer, config: ModelConfig | RecurrentConfig) -> None:
    """Raise ClearheadError if the tokenizer has a token without an embedding."""
    if isinstance(config, RecurrentConfig):
        num_embeddings = min(config.source_vocab_size, config.target_vocab_size)
    else:
        if config.reads_audio:
            raise ClearheadError(f"{name} reads audio; recipes, which have no audio data, cannot train it")
        stacks = [stack for stack in (config.encoder, config.decoder) if stack is not None]
        num_embeddings = min(stack.token_embedding.vocab_size for stack in stacks)
    if tokenizer.vocab_size > num_embeddings:
        raise ClearheadError(
            f"{name} cannot be trained: its tokenizer has {tokenizer.vocab_size} tokens, but its embedding only "
            f"{num_embeddings}; use the tokenizer of the model"
        )


def network_kind(config: ModelConfig | RecurrentConfig) -> NetworkKind:
    """Return the kind of a network."""
    if isinstance(config, RecurrentConfig) or config.is_encoder_decoder:
        return "an encoder-decoder"
    return "a decoder" if config.encoder is None else "an encoder"


def _required_kind(data: Data) -> NetworkKind:
    """Return the kind of network that can learn from this data."""
    match data:
        case LongText(objective=Masked()):
            return "an encoder"
        case LongText(objective=SpanCorruption()) | PairData(form="translation") | SyntheticData(form="translation"):
            return "an encoder-decoder"
        case _:
            return "a decoder"


def _check_network_kind(data: Data, config: ModelConfig | RecurrentConfig) -> None:
    """Raise ClearheadError if the network cannot learn from the data."""
    if network_kind(config) != _required_kind(data):
        raise ClearheadError(
            f"the model is {network_kind(config)}, but the {kind_of(type(data))} of this recipe needs "
            f"{_required_kind(data)}; change the model or data.{'objective' if isinstance(data, LongText) else 'form'}"
        )
    if isinstance(config, ModelConfig) and config.head is None:
        raise ClearheadError("the model has no head, so it cannot predict tokens; use a model with a head")


def _check_context(data: Data, context: int) -> None:
    """Raise ClearheadError if a row of the data can be longer than the context of the model."""
    longest = data.context
    if isinstance(data, LongText) and isinstance(data.objective, SpanCorruption):
        longest = max(span_corruption_lengths(data.context, data.objective.share, data.objective.mean_length))
    if longest > context:
        rows = "" if longest == data.context else f" (rows of {longest} tokens with span corruption)"
        raise ClearheadError(
            f"data.context is {data.context}{rows}, but the model's context is {context}; lower the first or raise the "
            "second"
        )


def _build_tokenizer(recipe: Recipe) -> Tokenizer:
    """Return the tokenizer of a new model.

    Pairs and chats need tokens for start, end and padding. Long texts use the default special tokens of each kind.
    """
    special_tokens = None if isinstance(recipe.data, LongText) else PAIR_SPECIAL_TOKENS
    match recipe.tokenizer:
        case CharacterTokenizer():
            return train_tokenizer(tokenizer_texts(recipe.data), "character", special_tokens=special_tokens)
        case ByteTokenizer():
            return byte_tokenizer(special_tokens)
        case LearnedTokenizer(algorithm=algorithm, vocab_size=vocab_size):
            texts, extra_tokens = tokenizer_texts(recipe.data), _objective_tokens(recipe.data)
            return train_tokenizer(texts, algorithm, vocab_size, special_tokens, extra_tokens)
        case TokenizerFile(path=path):
            return load_tokenizer(path)
        case None:
            raise AssertionError("only recipes with a loaded model have no tokenizer")


def _objective_tokens(data: Data) -> list[str]:
    """Return the special tokens that the objective inserts into the text."""
    match data.objective if isinstance(data, LongText) else None:
        case Masked(mask_token=token):
            return [token]
        case SpanCorruption(sentinel=sentinel, share=share, mean_length=mean_length):
            _, num_spans = count_noise(data.context, share, mean_length)
            return [sentinel.format(number) for number in range(num_spans)]
        case _:
            return []
