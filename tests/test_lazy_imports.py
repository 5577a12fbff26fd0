"""Names that a package imports on first use."""

import subprocess
import sys

import pytest

from clearhead.lazy_imports import lazy_exports

PACKAGES = (
    "clearhead",
    *(f"clearhead.{name}" for name in ("parallel", "server", "studies", "tokenization", "training")),
)


def test_a_name_comes_from_the_module_that_defines_it():
    get_name = lazy_exports("json", {"decoder": ["JSONDecoder"], "encoder": ["JSONEncoder"]})
    from json import JSONDecoder, JSONEncoder

    assert (get_name("JSONDecoder"), get_name("JSONEncoder")) == (JSONDecoder, JSONEncoder)


def test_an_unknown_name_raises_attribute_error():
    with pytest.raises(AttributeError, match=r"^module 'json' has no attribute 'JSONDecodre'$"):
        lazy_exports("json", {"decoder": ["JSONDecoder"]})("JSONDecodre")


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_a_package_does_not_import_torch_and_every_exported_name_exists(package):
    code = f"import sys, {package}; assert 'torch' not in sys.modules; from {package} import *"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
