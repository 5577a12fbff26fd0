"""Keys, hosts, origins and ids of requests (A17, A23, S9, S10)."""

import pytest

from clearhead.errors import ClearheadError
from clearhead.server import ServerSettings
from clearhead.server.api_errors import ApiError
from clearhead.server.security import check_host
from tests.server.toys import CHAT, serve, toy_model

KEYS = ("first-key", "second-key")


@pytest.fixture(scope="module")
def guarded():
    with serve(toy_model(), api_keys=KEYS, allowed_origins=("https://example.org",)) as running:
        yield running


def test_every_route_but_health_and_the_page_needs_a_key(guarded):
    from clearhead.server import create_app
    from clearhead.server.app import public_paths

    routes = create_app(guarded.state).routes
    paths = [(method, route.path) for route in routes for method in route.methods - {"HEAD"}]
    assert {"/health", "/", "/metrics", "/v1/completions", "/inspect/lens"} <= {path for _, path in paths}
    assert all(path in ("/", "/health") or path.startswith("/assets/") for path in public_paths())
    for method, path in paths:
        url = path.replace("{name:path}", "toy")
        answer = guarded.client.request(method, url)
        if path in public_paths():
            assert answer.status_code == 200
            continue
        assert answer.status_code == 401, path
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("key", KEYS)
def test_a_key_is_accepted_in_both_headers(guarded, key):
    for headers in ({"Authorization": f"Bearer {key}"}, {"authorization": f"bearer {key}"}, {"X-Api-Key": key}):
        assert guarded.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Basic first-key"},
        {"Authorization": "first-key"},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer first-key second-key"},
        {"X-Api-Key": "first-ke"},
    ],
)
def test_other_keys_are_refused(guarded, headers):
    answer = guarded.post("/v1/completions", {"prompt": "Hi"}, headers=headers)
    assert answer.status_code == 401
    assert "wrong" not in answer.json()["error"]["message"] or "API key" in answer.json()["error"]["message"]
    assert not any(key in answer.text for key in KEYS)


def test_prefixes_are_shared_only_within_one_key(guarded):
    prompt = "A long prompt that fills more than one page of the cache of keys and values. "

    def cached(**headers):
        answer = guarded.post("/v1/completions", {"prompt": prompt, "max_tokens": 1}, headers=headers)
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached(Authorization="Bearer first-key") == 0
    assert cached(Authorization="Bearer first-key") >= 64
    assert cached(Authorization="Bearer second-key") == 0


def test_other_origins_get_no_permission(guarded, server):
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    allowed = guarded.client.options("/v1/completions", headers={"Origin": "https://example.org", **ask})
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://example.org"
    refused = guarded.client.options("/v1/completions", headers={"Origin": "https://evil.example", **ask})
    assert "access-control-allow-origin" not in refused.headers
    plain = server.client.options("/v1/completions", headers={"Origin": "https://example.org", **ask})
    assert plain.status_code == 405
    assert "access-control-allow-origin" not in plain.headers


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8000", "localhost:80", "LOCALHOST", "[::1]:8000", "[::1]"])
def test_hosts_of_this_machine_are_served(host):
    check_host(host, ServerSettings())


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "localhost.evil.example", "", None, "10.0.0.1"])
def test_other_hosts_are_refused_on_loopback(host, server):
    with pytest.raises(ApiError) as caught:
        check_host(host, ServerSettings())
    assert caught.value.status == 403
    check_host(host, ServerSettings(host="0.0.0.0"))
    if host:
        assert server.get("/health", headers={"Host": host}).status_code == 403
        check_host(host, ServerSettings(allowed_hosts=(host.partition(":")[0],)))


def test_ids_of_requests_are_echoed_or_made(server):
    assert server.get("/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    made = {server.get("/health").headers["x-request-id"] for _ in range(3)}
    assert len(made) == 3
    assert server.get("/health", headers={"X-Request-Id": "x" * 200}).headers["x-request-id"] != "x" * 200


def test_too_many_headers_are_refused(server):
    answer = server.get("/health", headers={f"X-{number}": "1" for number in range(150)})
    assert answer.status_code == 431


def test_an_unexpected_error_says_nothing_about_the_machine(server, monkeypatch, caplog):
    def fail(*arguments):
        raise RuntimeError("secret at /home/somebody/model.py 0x7f00deadbeef")

    monkeypatch.setattr(type(server.service), "check_model", fail)
    answer = server.post("/v1/chat/completions", {"messages": CHAT})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "secret" not in answer.text
    assert "secret" in caplog.text


@pytest.mark.parametrize("key", ["", "with space", "schlüssel"])
def test_keys_that_headers_cannot_carry_are_refused(key):
    with pytest.raises(ClearheadError, match="API key"):
        ServerSettings(api_keys=(key,))


def test_keys_are_not_shown():
    assert "hidden" not in repr(ServerSettings(api_keys=("hidden",)))
