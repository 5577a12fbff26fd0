"""Parameters of the Gopher and PaLM presets, counted on the meta device and compared with the published numbers."""

import pytest
import torch

from clearhead.families import gopher, palm, preset
from clearhead.model.transformer import Transformer

GOPHER = {  # Rae et al. 2021, Table 1
    "gopher-44m": "44M",
    "gopher-117m": "117M",
    "gopher-417m": "417M",
    "gopher-1.4b": "1.4B",
    "gopher-7.1b": "7.1B",
    "gopher-280b": "280B",
}
PALM = {  # Chowdhery et al. 2022, Table 1, in billions
    "palm-8b": 8.63,
    "palm-62b": 62.50,
    "palm-540b": 540.35,
}


def parameters(name):
    with torch.device("meta"):
        return list(Transformer(preset(name)).parameters())


def test_every_preset_has_a_published_count():
    assert GOPHER.keys() == gopher.PRESETS.keys()
    assert PALM.keys() == palm.PRESETS.keys()


@pytest.mark.parametrize(("name", "published"), GOPHER.items())
def test_number_of_parameters_of_gopher(name, published):
    digits = len(published.partition(".")[2].rstrip("MB"))
    unit = {"M": 1e6, "B": 1e9}[published[-1]]
    count = sum(parameter.numel() for parameter in parameters(name))
    assert f"{count / unit:.{digits}f}{published[-1]}" == published


@pytest.mark.parametrize(("name", "published"), PALM.items())
def test_number_of_parameters_of_palm(name, published):
    # The published numbers leave out the norms; with them, the largest model has 540.36.
    matrices = sum(parameter.numel() for parameter in parameters(name) if parameter.ndim == 2)
    assert round(matrices / 1e9, 2) == published
