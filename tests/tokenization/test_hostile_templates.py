"""Hostile chat templates end soon and in little memory, measured in a process of their own."""

import json
import subprocess
import sys

import pytest

from tests.tokenization.hostile_templates import TEMPLATES

LIMIT_SECONDS = 0.5
# The clock is checked between steps; the longest step takes a fraction of a second.
MAX_SECONDS = 2.0
# All values together may take 256 MiB; one step may copy and escape a text of 8 million characters.
MAX_BYTES = 450 << 20

# Prints the processor seconds, the peak memory in bytes and what the template gave.
RENDER = """
import json, resource, sys, time
from pathlib import Path
from clearhead.tokenization.template_sandbox import TemplateSandbox
source = json.load(sys.stdin)
start_seconds = time.process_time()
try:
    outcome = TemplateSandbox(LIMIT_SECONDS).render(source, {"messages": [{"role": "user", "content": "x"}]})[:100]
except Exception as error:
    outcome = f"{type(error).__name__}: {str(error)[:300]}"
seconds = time.process_time() - start_seconds
status = Path("/proc/self/status")
if status.exists():  # a process that was forked from a larger one reports its parent's peak as its own
    peak = int(status.read_text().split("VmHWM:")[1].split()[0]) << 10
else:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([seconds, peak, outcome]))
""".replace("LIMIT_SECONDS", str(LIMIT_SECONDS))


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_hostile_template_ends_soon_in_little_memory(name):
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RENDER],
        input=json.dumps(TEMPLATES[name]),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    seconds, peak_bytes, outcome = json.loads(run.stdout)
    assert seconds < MAX_SECONDS, outcome
    assert peak_bytes < MAX_BYTES, outcome
