"""Read the small files beside a tokenizer: special tokens, chat template, tokens added to a text.

    settings = TokenizerSettings.read(Path("model_folder"))

Files and keys are those of Hugging Face repositories; each file is optional.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken

from clearhead.errors import ClearheadError, quote
from clearhead.files import read_json_object, read_text
from clearhead.tokenization.library_tokenizer import SpecialTokens

TokenLookup = Callable[[int], str | None]  # the text of an id, or None
# Role in SpecialTokens -> role in the keys of the files
_ROLES = {"bos": "bos", "eos": "eos", "pad": "pad", "unknown": "unk"} | {
    "classification": "cls",
    "separator": "sep",
    "mask": "mask",
}


@dataclass(frozen=True, kw_only=True)
class TokenizerSettings:
    """The contents of the files; each value is checked when it is used."""

    tokenizer_config: Mapping[str, object]
    special_tokens_map: Mapping[str, object]
    generation_config: Mapping[str, object]
    template_file: str | None

    @classmethod
    def read(cls, folder: Path) -> "TokenizerSettings":
        """Return the settings in a folder."""
        template = folder / "chat_template.jinja"
        return cls(
            tokenizer_config=read_json_object(folder / "tokenizer_config.json"),
            special_tokens_map=read_json_object(folder / "special_tokens_map.json"),
            generation_config=read_json_object(folder / "generation_config.json"),
            template_file=read_text(template) if template.is_file() else None,
        )

    def special_tokens(self, look_up: TokenLookup, defaults: SpecialTokens) -> SpecialTokens:
        """Return the special tokens; `defaults` for the roles that no file defines."""
        roles = {
            role: self._named_token(f"{key}_token") or self._generation_token(look_up, key) or getattr(defaults, role)
            for role, key in _ROLES.items()
        }
        eos_ids = self.generation_config.get("eos_token_id")
        stops = [_look_up_token(look_up, token_id) for token_id in eos_ids] if isinstance(eos_ids, list) else []
        listed = self.tokenizer_config.get("stop_tokens", [])
        if not isinstance(listed, list) or not all(isinstance(token, str) for token in listed):
            raise ClearheadError("stop_tokens in tokenizer_config.json is not a list of tokens")
        return SpecialTokens(**roles, stops=(*stops, *listed))

    def adds_token(self, role: str) -> bool | None:
        """Return whether encoding adds the "bos" or "eos" token to a text; None if no file says so.

        Only for SentencePiece models; a tokenizer.json contains this information itself and takes precedence.
        """
        value = self.tokenizer_config.get(f"add_{role}_token")
        if value is not None and not isinstance(value, bool):
            raise ClearheadError(
                f"add_{role}_token in tokenizer_config.json is {quote(value)}; it must be true or false"
            )
        return value

    def chat_template(self) -> str | None:
        """Return the chat template; of several named ones, the one named "default"."""
        template = self.template_file or self.tokenizer_config.get("chat_template")
        if isinstance(template, list):  # several named templates
            entries = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
            template = entries[0].get("template") if entries else None
        if template is not None and not isinstance(template, str):
            raise ClearheadError("the chat template in tokenizer_config.json is not text")
        return template

    def added_tokens(self) -> dict[int, AddedToken]:
        """Return the tokens that follow those of a SentencePiece model, by their ids."""
        listed = self.tokenizer_config.get("added_tokens_decoder", {})
        if not isinstance(listed, dict):
            raise ClearheadError("added_tokens_decoder in tokenizer_config.json is not an object")
        added = {}
        for key, entry in listed.items():
            token = _content(entry)
            if token is None or not (key.isdecimal() and len(key) < 10):
                raise ClearheadError(
                    f"added_tokens_decoder in tokenizer_config.json has a malformed entry {quote(key)}"
                )
            special = isinstance(entry, dict) and entry.get("special") is True
            added[int(key)] = AddedToken(token, special=special, normalized=False)
        return dict(sorted(added.items()))

    def _named_token(self, key: str) -> str | None:
        for source in (self.tokenizer_config, self.special_tokens_map):
            if source.get(key) is not None:
                token = _content(source[key])
                if token is None:
                    raise ClearheadError(f"{key} is {quote(source[key])}; it must be the text of a token")
                return token
        return None

    def _generation_token(self, look_up: TokenLookup, key: str) -> str | None:
        token_id = self.generation_config.get(f"{key}_token_id")
        if isinstance(token_id, list):
            token_id = token_id[0] if token_id else None
        # Some files write -1 for "none".
        return None if token_id is None or token_id == -1 else _look_up_token(look_up, token_id)


def _content(value: object) -> str | None:
    """Return the text of a token that is given as a string or as an object with `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _look_up_token(look_up: TokenLookup, token_id: object) -> str:
    token = None
    if isinstance(token_id, int) and 0 <= token_id < 2**31:
        token = look_up(token_id)
    if token is None:
        raise ClearheadError(
            f"generation_config.json contains the token id {quote(token_id)}, which is not in the vocabulary"
        )
    return token
