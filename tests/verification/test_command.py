"""`clearhead verify` as a user meets it: a table or JSON on stdout, exit code 1 where a check fails."""

import json

import pytest
from typer.testing import CliRunner

from clearhead.cache.stores import ContiguousStore
from clearhead.checkpoint.huggingface import save_folder
from clearhead.cli.app import app
from clearhead.verification.checks import CHECKS
from tests.checkpoint.tiny import tiny_network
from tests.verification.models import kernels_are_here


@pytest.fixture
def verify(tmp_path):
    save_folder(tiny_network().bfloat16(), tmp_path / "tiny")
    return lambda *options: CliRunner().invoke(app, ["verify", str(tmp_path / "tiny"), "--tokens", "4", *options])


def test_a_line_for_each_check_and_what_the_numbers_mean(verify):
    done = verify("--length", "30")
    assert done.exit_code == 0
    text = " ".join(done.stdout.split())
    assert all(f"{name} (" in text for name in CHECKS)
    assert "4 of 4 tokens equal" in text
    skipped = 4 if kernels_are_here() else 5
    assert f"{len(CHECKS) - skipped} pass, {skipped} skipped; in float32." in text
    assert "tolerance is 1e-05 times the logit of the likeliest token" in text


def test_json_has_the_numbers(verify):
    findings = json.loads(verify("--json").stdout)
    assert [finding["check"] for finding in findings] == list(CHECKS)
    assert all(
        finding.keys() == {"check", "largest_difference", "tolerance", "verdict", "detail"} for finding in findings
    )
    for finding in findings:
        if finding["verdict"] == "pass":
            assert 0 <= finding["largest_difference"] <= finding["tolerance"]
        else:
            assert finding["verdict"] == "skipped"
            assert finding["detail"]


def test_a_failure_is_exit_code_1(verify, monkeypatch):
    write = ContiguousStore.write
    monkeypatch.setattr(ContiguousStore, "write", lambda self, length, *pair: write(self, max(length - 1, 0), *pair))
    done = verify("--json")
    assert done.exit_code == 1
    verdicts = {finding["check"]: finding["verdict"] for finding in json.loads(done.stdout)}
    assert verdicts["cached == uncached"] == "fail"
    assert verdicts["padded left == unpadded"] == "pass"
    assert verify().exit_code == 1


def test_another_precision_is_said(verify):
    assert "in bfloat16" in " ".join(verify("--dtype", "bfloat16").stdout.split())


def test_help_has_an_example():
    done = CliRunner().invoke(app, ["verify", "--help"])
    assert done.exit_code == 0
    assert "clearhead verify smollm2" in done.stdout
    assert "--json" in done.stdout
