"""What the small files beside a tokenizer say: special tokens, chat template, framing.

    settings = TokenizerSettings.read(Path("model_folder"))

Files and keys are those of Hugging Face repositories; every file may be missing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken

from clearhead.errors import ClearheadError
from clearhead.files import read_object, read_text
from clearhead.tokenization.fast import SpecialTokens

TokenOf = Callable[[int], str | None]
ROLES = {"bos": "bos", "eos": "eos", "pad": "pad", "unknown": "unk"}


@dataclass(frozen=True, kw_only=True)
class TokenizerSettings:
    """The files' content, checked when it is asked for."""

    tokenizer_config: Mapping[str, object]
    special_tokens_map: Mapping[str, object]
    generation_config: Mapping[str, object]
    template_file: str | None

    @classmethod
    def read(cls, folder: Path) -> "TokenizerSettings":
        template = folder / "chat_template.jinja"
        return cls(
            tokenizer_config=read_object(folder / "tokenizer_config.json"),
            special_tokens_map=read_object(folder / "special_tokens_map.json"),
            generation_config=read_object(folder / "generation_config.json"),
            template_file=read_text(template) if template.is_file() else None,
        )

    def special_tokens(self, token_of: TokenOf, defaults: SpecialTokens) -> SpecialTokens:
        """The special tokens by role; `defaults` where no file names one."""
        roles = {
            role: self._named(f"{key}_token") or self._generation_token(token_of, key) or getattr(defaults, role)
            for role, key in ROLES.items()
        }
        ends = self.generation_config.get("eos_token_id")
        stops = [_checked_token(token_of, token_id) for token_id in ends] if isinstance(ends, list) else []
        listed = self.tokenizer_config.get("stop_tokens", [])
        if not isinstance(listed, list) or not all(isinstance(token, str) for token in listed):
            raise ClearheadError("stop_tokens in tokenizer_config.json is not a list of tokens")
        return SpecialTokens(**roles, stops=(*stops, *listed))

    def adds(self, role: str) -> bool | None:
        """Whether texts are framed by this token; None: the files do not say.

        For SentencePiece models; a tokenizer.json says itself how texts are framed, and is the truth.
        """
        value = self.tokenizer_config.get(f"add_{role}_token")
        if value is not None and not isinstance(value, bool):
            raise ClearheadError(f"add_{role}_token in tokenizer_config.json is {value!r}; true or false work")
        return value

    def chat_template(self) -> str | None:
        template = self.template_file or self.tokenizer_config.get("chat_template")
        if isinstance(template, list):  # several, of which one is for plain chats
            entries = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
            template = entries[0].get("template") if entries else None
        if template is not None and not isinstance(template, str):
            raise ClearheadError("the chat template in tokenizer_config.json is not text")
        return template

    def added_tokens(self) -> dict[int, AddedToken]:
        """Tokens that come after those of a SentencePiece model, by id."""
        listed = self.tokenizer_config.get("added_tokens_decoder", {})
        if not isinstance(listed, dict):
            raise ClearheadError("added_tokens_decoder in tokenizer_config.json is not an object")
        added = {}
        for key, entry in listed.items():
            token = _content(entry)
            if token is None or not (key.isdecimal() and len(key) < 10):
                raise ClearheadError(f"added_tokens_decoder in tokenizer_config.json has a malformed entry {key!r}")
            special = isinstance(entry, dict) and entry.get("special") is True
            added[int(key)] = AddedToken(token, special=special, normalized=False)
        return dict(sorted(added.items()))

    def _named(self, key: str) -> str | None:
        for source in (self.tokenizer_config, self.special_tokens_map):
            if source.get(key) is not None:
                token = _content(source[key])
                if token is None:
                    raise ClearheadError(f"{key} is {source[key]!r}, where a token's text is needed")
                return token
        return None

    def _generation_token(self, token_of: TokenOf, key: str) -> str | None:
        token_id = self.generation_config.get(f"{key}_token_id")
        if isinstance(token_id, list):
            token_id = token_id[0] if token_id else None
        # Some configurations write -1 for "none".
        return None if token_id is None or token_id == -1 else _checked_token(token_of, token_id)


def _content(value: object) -> str | None:
    """A token's text, given as such or as an object with its `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _checked_token(token_of: TokenOf, token_id: object) -> str:
    token = None
    if isinstance(token_id, int) and 0 <= token_id < 2**31:
        token = token_of(token_id)
    if token is None:
        raise ClearheadError(f"generation_config.json names the token id {token_id!r}, which has no token")
    return token
