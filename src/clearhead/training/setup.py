"""What a recipe asks for, made: tokenizer, datasets and network.

setup = prepare(recipe, Path("runs/x"), resumed=False); setup.network, setup.train, setup.validation
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from clearhead.api import load
from clearhead.architecture import ModelConfig
from clearhead.config import kind_of, to_dict
from clearhead.data import (
    Data,
    Dataset,
    Examples,
    LongText,
    Masked,
    PairData,
    SpanCorruption,
    SyntheticData,
    noise_of,
    open_data,
    span_lengths,
    start_id,
    texts_of,
)
from clearhead.errors import ClearheadError
from clearhead.families import Family
from clearhead.model import RecurrentConfig, RecurrentTranslator, Transformer
from clearhead.tokenization import SpecialTokens, Tokenizer, byte_tokenizer, load_tokenizer, train_tokenizer
from clearhead.training.models import LoadedModel, model_config
from clearhead.training.objective import Network
from clearhead.training.recipe import ByteTokenizer, CharacterTokenizer, LearnedTokenizer, Recipe, TokenizerFile, flat

NetworkForm = Literal["a decoder", "an encoder", "an encoder-decoder"]
FRAME = SpecialTokens(bos="<s>", eos="</s>", pad="<pad>", unknown="<unk>")
NAMES_OF_FILES = ("path", "validation_path", "source", "target")  # in [data] and [tokenizer]


@dataclass(frozen=True)
class Setup:
    network: Network
    tokenizer: Tokenizer
    train: Dataset
    validation: Dataset
    family: Family | None
    special_ids: dict[str, Any]

    @property
    def num_left_out(self) -> int:
        """Examples that are longer than the context, in training and validation."""
        return sum(part.num_left_out for part in (self.train, self.validation) if isinstance(part, Examples))


def prepare(recipe: Recipe, folder: Path, resumed: bool) -> Setup:
    """All that can be wrong with a recipe and its files is found here, before any training."""
    check_files(recipe, resumed)
    if isinstance(recipe.model, LoadedModel):
        setup = prepare_loaded(recipe, recipe.model)
    else:
        setup = prepare_new(recipe, folder, resumed)
    if isinstance(setup.network, Transformer) and setup.network.pooler is not None:
        setup.network.pooler.requires_grad_(False)  # no objective asks it, and DDP waits for what is never asked
    return setup


def check_files(recipe: Recipe, resumed: bool) -> None:
    """Here and not by the readers, which do not know what a path is called in the recipe."""
    parts = {"data"} if resumed else {"data", "tokenizer"}  # a run keeps its tokenizer
    read = {name: value for name, value in to_dict(recipe).items() if name in parts}
    for name, value in flat(read).items():
        if name.rpartition(".")[2] in NAMES_OF_FILES and not Path(value).exists():
            raise ClearheadError(
                f"{name} {value} does not exist; give --{name}, or see what each recipe reads: clearhead train --list"
            )


def prepare_new(recipe: Recipe, folder: Path, resumed: bool) -> Setup:
    tokenizer = load_tokenizer(folder / "tokenizer") if resumed else make_tokenizer(recipe)
    config = model_config(recipe.model, tokenizer.vocab_size)
    check_form(recipe.data, config)
    check_context(recipe.data, config.context)
    train, validation = open_data(recipe.data, tokenizer)
    torch.manual_seed(recipe.train.seed)
    network = RecurrentTranslator(config) if isinstance(config, RecurrentConfig) else Transformer(config)
    special_ids = {} if tokenizer.eos_id is None else {"eos_token_id": tokenizer.eos_id}
    if isinstance(config, RecurrentConfig) or config.is_encoder_decoder:
        special_ids["decoder_start_token_id"] = start_id(tokenizer)
    return Setup(network, tokenizer, train, validation, None, special_ids)


def prepare_loaded(recipe: Recipe, choice: LoadedModel) -> Setup:
    model = load(choice.name, dtype="float32", fast=False)
    if model.tokenizer is None:
        raise ClearheadError(f"{choice.name} has no tokenizer, so that no text can be read for it")
    check_form(recipe.data, model.config)
    check_context(recipe.data, model.config.context)
    train, validation = open_data(recipe.data, model.tokenizer, model.special_ids.get("decoder_start_token_id"))
    network = model.network
    if choice.dropout is not None:
        network = Transformer(replace(model.config, dropout=choice.dropout))
        network.load_state_dict(model.network.state_dict())
    torch.manual_seed(recipe.train.seed)
    return Setup(network, model.tokenizer, train, validation, model.family, model.special_ids)


def form_of(config: ModelConfig | RecurrentConfig) -> NetworkForm:
    if isinstance(config, RecurrentConfig) or config.is_encoder_decoder:
        return "an encoder-decoder"
    return "a decoder" if config.encoder is None else "an encoder"


def form_for(data: Data) -> NetworkForm:
    """What can learn from these data."""
    match data:
        case LongText(objective=Masked()):
            return "an encoder"
        case LongText(objective=SpanCorruption()) | PairData(form="translation") | SyntheticData(form="translation"):
            return "an encoder-decoder"
        case _:
            return "a decoder"


def check_form(data: Data, config: ModelConfig | RecurrentConfig) -> None:
    if form_of(config) != form_for(data):
        raise ClearheadError(
            f"the model is {form_of(config)}, and the {kind_of(type(data))} of this recipe is for {form_for(data)}; "
            f"change the model, or data.{'objective' if isinstance(data, LongText) else 'form'}"
        )
    if isinstance(config, ModelConfig) and config.head is None:
        raise ClearheadError("the model has no head, so that it cannot name the tokens it is asked for")


def check_context(data: Data, context: int) -> None:
    longest = data.context
    if isinstance(data, LongText) and isinstance(data.objective, SpanCorruption):
        longest = max(span_lengths(data.context, data.objective.share, data.objective.mean_length))
    if longest > context:
        rows = "" if longest == data.context else f", of which span corruption makes rows of {longest}"
        raise ClearheadError(
            f"data.context is {data.context}{rows}, the model is made for {context}; lower the one or raise the other"
        )


def make_tokenizer(recipe: Recipe) -> Tokenizer:
    """Long texts take the special tokens that are usual for each kind; questions and answers begin and end."""
    special = None if isinstance(recipe.data, LongText) else FRAME
    match recipe.tokenizer:
        case CharacterTokenizer():
            return train_tokenizer(texts_of(recipe.data), "character", special_tokens=special)
        case ByteTokenizer():
            return byte_tokenizer(special)
        case LearnedTokenizer(algorithm=algorithm, vocab_size=vocab_size):
            return train_tokenizer(texts_of(recipe.data), algorithm, vocab_size, special, extra_tokens(recipe.data))
        case TokenizerFile(path=path):
            return load_tokenizer(path)
        case None:
            raise AssertionError("a recipe without a tokenizer loads a model")


def extra_tokens(data: Data) -> list[str]:
    """What an objective writes into the text."""
    match data.objective if isinstance(data, LongText) else None:
        case Masked(mask_token=token):
            return [token]
        case SpanCorruption(sentinel=sentinel, share=share, mean_length=mean_length):
            _, num_spans = noise_of(data.context, share, mean_length)
            return [sentinel.format(number) for number in range(num_spans)]
        case _:
            return []
