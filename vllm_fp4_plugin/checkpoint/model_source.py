"""Source of a model: a directory, or a name on the hub.

A missing model is refused in one line, by commands and by a server. ``report`` needs only a model's
config, and downloads it as vLLM would. Other commands, and ``report --by-headers``, need every file
of the model, and accept a name only if all files are in the hub's cache.
"""

import logging
from pathlib import Path

from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from vllm_fp4_plugin.checkpoint.files import CONFIG, local_directory
from vllm_fp4_plugin.formats import UnsupportedCheckpoint

_OF_THE_HUB = (EntryNotFoundError, HfHubHTTPError, OfflineModeIsEnabled)


def check_config(model: str) -> None:
    """Check that a model is a directory, or on the hub: its config is cached or downloaded.

    Args:
        model: directory of a checkpoint, or its name on the hub; an address with ``://`` passes.

    Raises:
        UnsupportedCheckpoint: the model was not found; the message names the places searched.
    """
    if Path(model).is_dir() or "://" in model:
        return
    _check_name(model)
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)  # its retries are warnings, six of them
    try:
        hf_hub_download(model, CONFIG)
    except _OF_THE_HUB as error:
        if refused := explained(model, error):
            raise refused from error
    finally:
        logger.setLevel(level)


def explained(
    model: str, error: BaseException, revision: str | None = None
) -> UnsupportedCheckpoint | None:
    """Refusal of a model whose config the hub did not send; None for any other error.

    Args:
        model: name on the hub, as given by the user.
        error: error of a download, or error that such an error caused.
        revision: branch, tag or commit of the model; None: the default one.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, _OF_THE_HUB):
        cause = cause.__cause__ or cause.__context__
    if cause is None or Path(model).exists():
        return None
    if isinstance(try_to_load_from_cache(model, CONFIG, revision=revision), str):
        return None  # another file is missing
    if isinstance(cause, EntryNotFoundError) and not isinstance(cause, LocalEntryNotFoundError):
        return None  # of another format, which vLLM knows or refuses
    if isinstance(cause, GatedRepoError | RepositoryNotFoundError):
        return UnsupportedCheckpoint(
            f"{model}: is no directory, and {constants.ENDPOINT} shows no such model "
            f"({_first_line(cause)}); check the name, or log in with `hf auth login` if it is "
            "private or gated"
        )
    return _unreachable(model)


def whole_directory(model: str) -> Path:
    """Directory of a model, with all files on this machine.

    Args:
        model: directory of a checkpoint, or its name on the hub.

    Raises:
        UnsupportedCheckpoint: ``model`` is not a directory, and the hub's cache does not hold all
            files of a model of this name.
    """
    if Path(model).is_dir():
        return Path(model)
    _check_name(model)
    directory = local_directory(model)
    if directory is None:
        raise UnsupportedCheckpoint(
            f"{model}: is no directory, and not all of its files are in the hub's cache "
            f"({constants.HF_HUB_CACHE}); download them with `hf download {model}`, or give the "
            "directory of a checkpoint"
        )
    return directory


def _check_name(model: str) -> None:
    """Check that ``model``, known to be no directory, has the form of a name on the hub."""
    try:
        if not Path(model).exists() and not model.startswith("~"):
            validate_repo_id(model)
            return
    except HFValidationError:
        pass
    is_file = " but a file" if Path(model).is_file() else ""
    raise UnsupportedCheckpoint(
        f"{model}: is no directory{is_file}, must be that of a checkpoint, or a name at the hub "
        "such as org/model; check the path, or download the model with `hf download`"
    )


def _unreachable(model: str) -> UnsupportedCheckpoint:
    tried = (
        "HF_HUB_OFFLINE forbids to download it"
        if constants.HF_HUB_OFFLINE
        else f"{constants.ENDPOINT} cannot be reached"
    )
    return UnsupportedCheckpoint(
        f"{model}: is no directory, its {CONFIG} is not in the hub's cache "
        f"({constants.HF_HUB_CACHE}), and {tried}; download it with `hf download {model}` where "
        "there is a network, or give the directory of a checkpoint"
    )


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "refused")
