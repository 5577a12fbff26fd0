"""Test `clearhead verify`: a table or JSON on stdout, and exit code 1 if a check fails."""

import json

import pytest
from typer.testing import CliRunner

from clearhead.cache.stores import ContiguousStore
from clearhead.checkpoint.huggingface import save_folder
from clearhead.cli.app import app
from clearhead.verification.checks import CHECKS
from tests.checkpoint.tiny import tiny_network
from tests.verification.models import kernels_available


@pytest.fixture
def verify(tmp_path):
    save_folder(tiny_network().bfloat16(), tmp_path / "tiny")
    return lambda *options: CliRunner().invoke(app, ["verify", str(tmp_path / "tiny"), "--new-tokens", "4", *options])


def test_the_table_has_a_line_for_each_check_and_explains_the_numbers(verify):
    result = verify("--length", "30")
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    assert all(f"{name} (" in text for name in CHECKS)
    assert "4 of 4 tokens equal" in text
    skipped = 4 if kernels_available() else 5
    assert f"{len(CHECKS) - skipped} pass, {skipped} skipped, in float32." in text
    assert "tolerance is 1e-05 times the logit of the most likely token" in text


def test_json_has_differences_and_tolerances(verify):
    results = json.loads(verify("--json").stdout)
    assert [result["check"] for result in results] == list(CHECKS)
    assert all(result.keys() == {"check", "largest_difference", "tolerance", "verdict", "detail"} for result in results)
    for result in results:
        if result["verdict"] == "pass":
            assert 0 <= result["largest_difference"] <= result["tolerance"]
        else:
            assert result["verdict"] == "skipped"
            assert result["detail"]


def test_a_failed_check_exits_with_1(verify, monkeypatch):
    write = ContiguousStore.write
    monkeypatch.setattr(ContiguousStore, "write", lambda self, length, *pair: write(self, max(length - 1, 0), *pair))
    result = verify("--json")
    assert result.exit_code == 1
    verdicts = {one["check"]: one["verdict"] for one in json.loads(result.stdout)}
    assert verdicts["cached decoding == full forward"] == "fail"
    assert verdicts["left padding == no padding"] == "pass"
    assert verify().exit_code == 1


def test_the_table_names_the_dtype(verify):
    assert "in bfloat16" in " ".join(verify("--dtype", "bfloat16").stdout.split())


def test_help_has_an_example_and_the_options():
    result = CliRunner().invoke(app, ["verify", "--help"])
    assert result.exit_code == 0
    assert "clearhead verify smollm2" in result.stdout
    assert "--json" in result.stdout


def test_ctrl_c_prints_the_checks_that_have_run(verify, monkeypatch):
    def interrupt(case):
        raise KeyboardInterrupt

    checks = list(CHECKS)
    monkeypatch.setitem(CHECKS, checks[2], interrupt)
    done = verify()
    assert done.exit_code == 130
    assert checks[1] in done.stdout
    assert checks[2] not in done.stdout
    assert f"stopped after 2 of {len(checks)} checks" in " ".join(done.stderr.split())
