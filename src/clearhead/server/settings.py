"""The settings of a server: addresses, keys and limits. Without torch.

settings = ServerSettings(port=8000, api_keys=("secret",), max_queued=64, limits=Limits(max_choices=4))
"""

import functools
import ipaddress
import math
from dataclasses import dataclass, field, fields
from pathlib import Path

from clearhead.errors import ClearheadError, quote

_MAX_PORT = 65535
_COUNTS = ("max_concurrent", "max_queued_tokens")
_SECONDS = ("gather_seconds", "shutdown_seconds")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one request may ask for. Larger values are refused with an error that names the limit."""

    max_new_tokens: int = 32_768  # further limited by the model's context
    max_body_bytes: int = 4 << 20
    max_choices: int = 64  # n
    max_prompts: int = 1024  # per request for completions or embeddings
    max_messages: int = 1024
    max_tools: int = 128
    max_stop_strings: int = 16
    max_stop_characters: int = 256
    max_logit_biases: int = 1024
    max_logprobs: int = 20
    max_schema_characters: int = 65_536  # length of a JSON schema
    max_headers: int = 100
    header_seconds: float = 30.0  # from the connection, or the last answer, to the end of the headers
    body_seconds: float = 60.0
    write_seconds: float = 60.0  # how long a client may leave a piece of an answer unread
    request_seconds: float = 1800.0  # from the request to the end of the answer

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value <= 0:
                raise ClearheadError(f"{each.name} is {value}; it must be greater than 0")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How a server runs.

    aliases: further names under which clients may ask for the model.
    api_keys: clients need one of these; without any, anybody who can reach the port is served.
    allowed_hosts: names that the Host header may have besides loopback names, if the server listens on loopback.
    allowed_origins: web pages that may call the server from a browser (CORS); "*" allows all.
    max_concurrent: texts that are generated at the same time. None: 256 on a GPU, 32 on a CPU.
    max_queued: texts that may wait for a place; further requests are answered with 429.
    max_queued_tokens: prompt tokens of all unfinished texts; further requests are answered with 429.
    gather_seconds: with more than four requests, the new tokens of a text are sent together, at most this much apart.
    shutdown_seconds: how long running requests may take after SIGTERM or SIGINT.
    deterministic: a text is the same to the last bit, whatever else is served.
    memory: bytes for keys and values; None takes a share of the free memory.
    runs: a folder of training runs that the page shows.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    aliases: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_concurrent: int | None = None
    max_queued: int = 512
    max_queued_tokens: int = 1 << 20
    gather_seconds: float = 0.05
    shutdown_seconds: float = 30.0
    deterministic: bool = False
    memory: int | None = None
    runs: Path | None = None
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not 0 <= self.port <= _MAX_PORT:
            raise ClearheadError(f"port is {self.port}; it must be from 1 to {_MAX_PORT}, or 0 for any free port")
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ClearheadError(f"{name} is {value}; it must be 1 or more")
        if self.max_queued < 0:
            raise ClearheadError(f"max_queued is {self.max_queued}; it must be 0 or more")
        for name in _SECONDS:
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ClearheadError(f"{name} is {value}; it must be 0 or more")
        for key in self.api_keys:
            if not key or not key.isascii() or any(character.isspace() for character in key):
                raise ClearheadError("an API key must have at least one character, only ASCII, and no spaces")
        for name in self.aliases:
            if not name.strip() or not name.isprintable():
                raise ClearheadError(f"the alias {quote(name)} is not a valid name; it must be printable and not blank")
        if self.runs is not None and not self.runs.is_dir():
            raise ClearheadError(f"the folder of training runs {quote(str(self.runs))} does not exist; create it first")

    @property
    def listens_on_loopback(self) -> bool:
        """Whether only programs on this machine reach the server."""
        return is_loopback(self.host)


@functools.lru_cache(maxsize=64)  # asked for the host of every request
def is_loopback(host: str) -> bool:
    """Return whether a host is a name or an address of this machine that others cannot reach."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return False
