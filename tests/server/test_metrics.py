"""/metrics: names, help, and counts that equal what was sent (A22)."""

from prometheus_client.parser import text_string_to_metric_families

from clearhead.server.metrics import FINISH_REASONS
from tests.server.toys import LETTERS, serve, toy_model

NAMES = {
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio", "prompt_tokens", "generation_tokens"),
    *("request_success", "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
    "num_preemptions",
}


def read_metrics(server):
    """Return the values of all samples by name and labels."""
    answer = server.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = list(text_string_to_metric_families(answer.text))
    assert {family.name for family in families} >= {f"clearhead_{name}" for name in NAMES}
    assert all(family.documentation and family.type != "unknown" for family in families)
    for family in families:
        if family.type == "counter":
            assert all(sample.name.endswith(("_total", "_created")) for sample in family.samples)
    return {
        (sample.name.removeprefix("clearhead_"), *sorted(sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }


def test_counters_equal_what_was_sent_and_gauges_return_to_zero():
    with serve(toy_model()) as server:
        assert all(read_metrics(server)[("request_success_total", reason)] == 0 for reason in FINISH_REASONS)
        server.complete("Hello", max_tokens=5, n=2)
        server.chat(max_tokens=7)
        body = {"prompt": ["ab", "abc"], "max_tokens": 4, "logit_bias": LETTERS}
        server.events("/v1/completions", body)
        force = {str(server.service.model.tokenizer.eos_id): 100}
        server.complete("Hello", logit_bias=force)
        server.post("/v1/completions", {"prompt": "x" * 1000})  # refused
        server.wait_until_idle()
        found = read_metrics(server)
        chat_prompt = len("[user]Hello\n[assistant]")
        assert found[("prompt_tokens_total",)] == 5 + 5 + chat_prompt + 2 + 3 + 5
        assert found[("generation_tokens_total",)] == 2 * 5 + 7 + 2 * 4 + 1
        assert found[("request_success_total", "length")] == 2 + 1 + 2
        assert found[("request_success_total", "stop")] == 1
        assert found[("request_success_total", "abort")] == found[("request_success_total", "error")] == 0
        assert found[("time_to_first_token_seconds_count",)] == 6
        assert found[("e2e_request_latency_seconds_count",)] == 6
        assert found[("inter_token_latency_seconds_count",)] == 2 * 4 + 6 + 2 * 3
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio"):
            assert found[(name,)] == 0
        assert found[("http_responses_total", "/v1/completions", "400")] == 1
        assert found[("http_responses_total", "/v1/completions", "200")] == 3
