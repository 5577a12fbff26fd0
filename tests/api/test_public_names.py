"""The names of the package `clearhead`."""

import re
from importlib.metadata import version

import pytest

import clearhead


def test_public_names_are_sorted_importable_and_documented():
    assert clearhead.__all__ == sorted(clearhead.__all__)
    assert all(getattr(clearhead, name) is not None for name in clearhead.__all__)
    assert set(clearhead.__all__) <= set(re.findall(r"\w+", clearhead.__doc__))


def test_dir_lists_the_public_names_and_the_version():
    assert dir(clearhead) == sorted([*clearhead.__all__, "__version__"])


def test_the_version_is_that_of_the_package_metadata():
    assert clearhead.__version__ == version("clearhead")


def test_an_unknown_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'laod'"):
        clearhead.laod  # noqa: B018
