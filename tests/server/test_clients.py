"""Clients that others wrote, each in an environment of its own, against a server with a real model.

    CLEARHEAD_CLIENTS=FOLDER pytest -m slow tests/server/test_clients.py

tests/server/README.md says how to fill FOLDER: with the virtual environments openai2, llm, lm-eval, guidellm and
schemathesis, and the folder js with node_modules.
"""

import json
import os
import subprocess
from itertools import chain
from pathlib import Path

import pytest

import clearhead
from clearhead.evaluation.engine_likelihood import log_likelihoods_in_engine
from clearhead.evaluation.likelihood import encode_request
from clearhead.server import Limits
from tests.server.test_metrics import read_metrics
from tests.server.toys import serve, toy_model

pytestmark = pytest.mark.slow
CLIENTS = Path(os.environ.get("CLEARHEAD_CLIENTS", "no-clients"))
QUESTION = "What is the capital of France?"
PAIRS = [("The capital of France is", " Paris"), ("One plus one is", " two"), ("Naïve café", " owners – and more")]

OPENAI_2 = """
import sys, openai
assert openai.__version__.startswith("2.")
client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="x", max_retries=0, _strict_response_validation=True)
options = dict(model="smollm2", messages=[{"role": "user", "content": sys.argv[2]}], temperature=0, max_tokens=12)
text = client.chat.completions.create(**options, logprobs=True, top_logprobs=2).choices[0].message.content
chunks = client.chat.completions.create(**options, stream=True)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
with client.chat.completions.stream(**options) as stream:
    assert stream.get_final_completion().choices[0].message.content == text
answer = client.responses.create(model="smollm2", input=sys.argv[2], temperature=0, max_output_tokens=12)
assert answer.output_text == text
try:
    client.models.retrieve("other")
except openai.NotFoundError as error:
    assert error.code == "model_not_found"
print(text)
"""
OPENAI_JS = """
import OpenAI from "openai";
const client = new OpenAI({baseURL: process.argv[2] + "/v1", apiKey: "x", maxRetries: 0});
const messages = [{role: "user", content: process.argv[3]}];
const options = {model: "smollm2", messages, temperature: 0, max_tokens: 12};
const text = (await client.chat.completions.create(options)).choices[0].message.content;
let streamed = "";
for await (const chunk of await client.chat.completions.create({...options, stream: true}))
  streamed += chunk.choices[0]?.delta?.content ?? "";
const whole = await client.chat.completions.stream(options).finalContent();
if (streamed !== text || whole !== text) throw new Error("the texts differ");
const vectors = await client.embeddings.create({model: "smollm2", input: ["a", "b"]});
if (vectors.data.length !== 2) throw new Error("two vectors expected");
console.log(text);
"""
LM_EVAL = """
import json, sys
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
options = dict(model="smollm2", tokenizer_backend="remote", num_concurrent=2, batch_size=2)
lm = LocalCompletionsAPI(base_url=sys.argv[1] + "/v1/completions", **options)
requests = [Instance("loglikelihood", {}, tuple(pair), number) for number, pair in enumerate(json.loads(sys.argv[2]))]
print(json.dumps(lm.loglikelihood(requests)))
"""


def program(*names):
    """Return the path of a client's program; skip the test if it is not installed."""
    path = CLIENTS.joinpath(*names)
    if not path.exists():
        pytest.skip(f"{'/'.join(names)} is not in CLEARHEAD_CLIENTS; see tests/server/README.md")
    return str(path)


def output(*command, **options):
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, **options)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout.strip()


def load_smollm2(**options):
    try:
        return clearhead.load("smollm2", **options)
    except clearhead.ClearheadError as error:
        pytest.skip(f"smollm2 is not installed: {error}")


@pytest.fixture(scope="module")
def real():
    """A server with SmolLM2 in float64: in float32, batches round sums differently, by up to 2e-5 in a score."""
    with serve(load_smollm2(dtype="float64"), names=("smollm2",)) as running:
        yield running
        running.wait_until_idle()


def test_openai_python_2(real):
    assert "Paris" in output(program("openai2", "bin", "python"), "-c", OPENAI_2, real.url, QUESTION)


def test_openai_javascript(real):
    program("js", "node_modules", "openai")
    script = CLIENTS / "js" / "clearhead-check.mjs"
    script.write_text(OPENAI_JS, encoding="utf-8")
    assert "Paris" in output("node", str(script), real.url, QUESTION)


def test_llm(real, tmp_path):
    command = [program("llm", "bin", "llm"), "openai", "endpoint", f"{real.url}/v1"]
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path)}
    assert output(*command, "--models", env=environment) == "smollm2"
    options = ["-m", "smollm2", "-o", "temperature", "0", "-o", "max_tokens", "40"]
    assert "Paris" in output(*command, *options, QUESTION, env=environment)


def harness_results(url):
    """Return what lm-evaluation-harness finds out over the API: sums of log-probabilities, and whether greedy."""
    command = [program("lm-eval", "bin", "python"), "-c", LM_EVAL, url, json.dumps(PAIRS)]
    return json.loads(output(*command).split("\n")[-1])


def test_lm_evaluation_harness_gets_the_scores_of_the_python_api(real):
    found = harness_results(real.url)
    model = real.service.model
    for (context, continuation), (total, is_greedy) in zip(PAIRS, found, strict=True):
        num_context = len(model.tokenizer.encode(context, False))
        scored = model.score(context + continuation).logprobs[num_context - 1 :]
        assert total == pytest.approx(float(sum(scored)), abs=1e-6)
        assert isinstance(is_greedy, bool)
    assert found[0][1] is True


def test_lm_evaluation_harness_gets_the_bits_of_the_evaluation_in_the_engine():
    """In float32, too. An evaluation in batches adds in another order: its sums differ by up to 6e-5 here."""
    model = load_smollm2()
    requests = [encode_request(*pair, model.tokenizer) for pair in PAIRS]
    expected = log_likelihoods_in_engine(model.engine(deterministic=True), requests)
    with serve(model, names=("smollm2",), deterministic=True) as server:
        found = harness_results(server.url)
    assert found == [[sum(each.logprobs), each.is_greedy] for each in expected]  # the harness adds from the left, too


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_guidellm_counts_the_tokens_that_the_server_counts(real, tmp_path, path):
    """guidellm takes the tokenizer of its random prompts from the hub unless it is told a folder."""
    real.service.model.tokenizer.save(tmp_path / "tokenizer")
    options = {
        "--backend": f"kind=openai_http,target={real.url},request_format={path}",
        "--tokenizer": f"kind=huggingface_auto,model={tmp_path / 'tokenizer'}",
        "--data": "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
        "--profile": "kind=concurrent,streams=3",
        "--constraint": "kind=max_requests,count=6",
        "--output": f"kind=json,path={tmp_path / 'report.json'}",
    }
    before = read_metrics(real)
    command = [program("guidellm", "bin", "guidellm"), "run", "--disable-console-interactive"]
    output(*command, *chain(*options.items()), env={**os.environ, "HF_HUB_OFFLINE": "1"}, cwd=tmp_path)
    after = read_metrics(real)
    (found,) = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["benchmarks"]
    assert found["metrics"]["request_totals"] == {"successful": 6, "errored": 0, "incomplete": 0, "total": 6}
    for name, key in (("prompt_tokens_total", "input_metrics"), ("generation_tokens_total", "output_metrics")):
        counted = sum(request[key]["total_tokens"] for request in found["requests"]["successful"])
        assert counted == after[(name,)] - before[(name,)]
    assert [request["output_metrics"]["total_tokens"] for request in found["requests"]["successful"]] == [8] * 6
    for request in found["requests"]["successful"]:
        assert 0 < request["time_to_first_token_ms"] < request["request_latency"] * 1000


def test_schemathesis_finds_no_server_error():
    command = [program("schemathesis", "bin", "schemathesis"), "run"]
    options = ["--checks", "not_a_server_error", "--max-examples", "30", "--phases", "examples,coverage,fuzzing"]
    with serve(toy_model(), limits=Limits(max_new_tokens=32)) as server:
        shown = output(*command, f"{server.url}/openapi.json", *options)
        assert "passed" in shown
        server.wait_until_idle(20)
