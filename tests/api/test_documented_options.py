"""The keyword options of the public API: type hints, docstrings and option classes agree."""

import inspect
from dataclasses import fields
from typing import Any, Unpack, get_args, get_origin, get_type_hints

import pytest

import clearhead
from clearhead.api import Chat, Model, RecurrentBaseline
from clearhead.cli.sampling import OPTIONS
from clearhead.options import BeamOptions, GenerateKeywords, SamplingKeywords, SamplingOptions, option_fields

METHODS = {
    Model.generate: GenerateKeywords,
    Model.generate_many: GenerateKeywords,
    Model.stream: SamplingKeywords,
    Chat.say: SamplingKeywords,
    Chat.stream: SamplingKeywords,
    RecurrentBaseline.generate: GenerateKeywords,
    RecurrentBaseline.generate_many: GenerateKeywords,
}
DOCUMENTED = [method for method in METHODS if not method.__qualname__.startswith("Recurrent")]
FUNCTIONS = (clearhead.load, clearhead.create, clearhead.cost)


def name_of(function):
    return function.__qualname__


def test_sampling_keywords_are_the_fields_of_sampling_options():
    assert get_type_hints(SamplingKeywords) == get_type_hints(SamplingOptions)
    assert {each.name for each in option_fields(SamplingOptions)} == {each.name for each in fields(SamplingOptions)}


def test_generate_keywords_are_those_of_sampling_and_beam_search():
    beam_hints = get_type_hints(BeamOptions)
    del beam_hints["num_beams"], beam_hints["num_best"]  # generate calls them beams and n
    assert get_type_hints(GenerateKeywords) == get_type_hints(SamplingOptions) | beam_hints
    assert {each.name for each in option_fields(BeamOptions)} == set(beam_hints)


def test_options_of_both_classes_have_the_same_default_and_description():
    sampling = {each.name: each for each in option_fields(SamplingOptions)}
    shared = [each for each in option_fields(BeamOptions) if each.name in sampling]
    assert {each.name for each in shared} == {"max_new_tokens", "stop_ids"}
    for each in shared:
        assert (each.default, each.metadata) == (sampling[each.name].default, sampling[each.name].metadata)


@pytest.mark.parametrize("method", METHODS, ids=name_of)
def test_methods_take_typed_keyword_options(method):
    (variadic,) = [p for p in inspect.signature(method).parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
    assert get_origin(variadic.annotation) is Unpack
    assert get_args(variadic.annotation) == (METHODS[method],)


@pytest.mark.parametrize("method", DOCUMENTED, ids=name_of)
def test_docstrings_list_every_option_with_its_default_and_one_line(method):
    documented = inspect.getdoc(method).partition("\nOptions:\n")[2].splitlines()
    classes = (SamplingOptions, BeamOptions) if METHODS[method] is GenerateKeywords else (SamplingOptions,)
    expected = {each.name: each for part in classes for each in option_fields(part)}
    assert documented == [
        f"    {name}={each.default!r}: {each.metadata['description']}" for name, each in expected.items()
    ]
    assert set(expected) == set(get_type_hints(METHODS[method]))
    assert all(len(line) <= 120 for line in documented)


@pytest.mark.parametrize("method", DOCUMENTED, ids=name_of)
def test_docstrings_describe_the_other_arguments(method):
    others = set(inspect.signature(method).parameters) - {"self", "prompt", "prompts", "text", "options"}
    assert all(name in inspect.getdoc(method) for name in others)


@pytest.mark.parametrize("function", FUNCTIONS, ids=name_of)
def test_functions_describe_every_argument(function):
    lines = inspect.getdoc(function).splitlines()
    for name, parameter in inspect.signature(function).parameters.items():
        assert parameter.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        assert any(line.strip().startswith(f"{name}:") for line in lines), f"{name} is not described"


def test_no_public_method_takes_arbitrary_keywords():
    for owner in (Model, Chat, RecurrentBaseline):
        for name, method in inspect.getmembers(owner, inspect.isfunction):
            if not name.startswith("_"):
                parameters = inspect.signature(method).parameters.values()
                variadic = [each for each in parameters if each.kind is inspect.Parameter.VAR_KEYWORD]
                assert all(each.annotation is not Any for each in variadic), name


def test_the_command_line_has_every_sampling_option():
    assert set(OPTIONS) == {each.name for each in fields(SamplingOptions)} - {"logprobs"}  # an option of generate only
