"""Find the files of a model from what the user gives: a path, a name of the catalog or a hub id.

path = resolve_path("smollm2")
"""

from pathlib import Path

from clearhead.catalog import locate_model
from clearhead.checkpoint.huggingface import CONFIG_FILE, INDEX_FILE
from clearhead.checkpoint.replacement import restore_previous
from clearhead.errors import ClearheadError
from clearhead.families import presets
from clearhead.files import check_path_length
from clearhead.home import expand_user

# Patterns of files on the hub. Pickle files and code are not fetched.
_MODEL_PATTERNS = ("*.json", "*.safetensors", "*.model", "*.spm", "*.jinja")
_CONFIG_PATTERNS = (CONFIG_FILE, INDEX_FILE)
_IGNORED_PATTERNS = ("*/*", "consolidated*")  # the same weights in other formats, which would double the download


def resolve_path(model: str | Path, *, config_only: bool = False) -> Path:
    """Return the path of an existing file or folder, of an installed model, or of a model fetched from the hub.

    With `config_only`, only the files that `read_config` needs are fetched from the hub.
    """
    check_path_length(model)
    restore_previous(expand_user(model).absolute())
    path = locate_model(model, presets(), config_only=config_only)
    return path or fetch_from_hub(str(model), _CONFIG_PATTERNS if config_only else _MODEL_PATTERNS)


def fetch_from_hub(hub_id: str, patterns: tuple[str, ...]) -> Path:
    """Fetch the files of a hub model that match `patterns`; return the folder that contains them."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
        )
    except ImportError:
        raise ClearheadError(
            f"{hub_id} is neither a path nor the name of a model; "
            'to load it from the Hugging Face Hub, run: pip install "clearhead[hub]"'
        ) from None
    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(patterns), ignore_patterns=list(_IGNORED_PATTERNS)))
    except RepositoryNotFoundError:
        raise ClearheadError(
            f"the Hugging Face Hub has no model {hub_id} that you may read; check the name, or set HF_TOKEN if it is "
            "private"
        ) from None
    except HFValidationError:
        raise ClearheadError(f"{hub_id} does not exist, and cannot be the name of a model on the Hub") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ClearheadError(
            f"{hub_id} does not exist here and could not be fetched from the Hugging Face Hub ({reason}); check the "
            "name and the network, or give the path of a folder"
        ) from None
