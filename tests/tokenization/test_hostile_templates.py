"""Hostile chat templates end soon and in little memory, measured in a process of their own."""

import pytest

from tests.tokenization.hostile_templates import TEMPLATES
from tests.tokenization.measured_forks import measured_forks

LIMIT_SECONDS = 0.5
# The clock is checked between steps; the longest step takes a fraction of a second.
MAX_SECONDS = 2.0
# All values together may take 256 MiB; one step may copy and escape a text of 8 million characters.
MAX_BYTES = 450 << 20

RENDER = """
from clearhead.tokenization.template_sandbox import TemplateSandbox

def run(source):
    try:
        return TemplateSandbox(LIMIT_SECONDS).render(source, {"messages": [{"role": "user", "content": "x"}]})[:100]
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
""".replace("LIMIT_SECONDS", str(LIMIT_SECONDS))


@pytest.fixture(scope="module")
def render():
    with measured_forks(RENDER) as measure:
        yield measure


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_hostile_template_ends_soon_in_little_memory(name, render):
    seconds, peak_bytes, outcome = render(TEMPLATES[name])
    assert seconds < MAX_SECONDS, outcome
    assert peak_bytes < MAX_BYTES, outcome


CONTROLS = """
import os, time

def run(name):
    if name == "crash":
        os.abort()
    if name == "memory":
        return str(len(bytes([1]) * (200 << 20)))
    started = time.process_time()
    while time.process_time() - started < 0.3:
        pass
    return "slow"
"""


def test_the_measurement_notices_a_crash_and_time_and_memory():
    with measured_forks(CONTROLS) as measure:
        assert measure("crash")[0] > MAX_SECONDS
        assert 200 << 20 < measure("memory")[1] < 300 << 20
        seconds, peak_bytes, outcome = measure("time")
    assert 0.3 <= seconds < MAX_SECONDS
    assert peak_bytes < 100 << 20
    assert outcome == "slow"
