"""Where on this machine a model lies that a user names by path or hub id."""

from pathlib import Path

from vllm.logger import init_logger

logger = init_logger("vllm.sharded_state.origins")


def local_folder(origin: str, revision: str | None) -> Path | None:
    """The directory of a model or tokenizer: itself, or its snapshot in the hub's cache."""
    if Path(origin).is_dir():
        return Path(origin)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(origin, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError):
        logger.warning("%s is not on this machine: no files of it are used", origin)
        return None
