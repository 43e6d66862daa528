"""Where a checkpoint lies: a directory, a repository on a hub, or a prefix in object storage.

Each kind gives the same: the manifest, the names of its files, and a reader of some of them. Nothing but
the manifest is fetched before a reader is asked for, so a checkpoint that does not belong here is
refused first, and files of other ranks are never fetched.
"""

import glob
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from vllm.logger import init_logger

from .checkpoint import manifest, store
from .checkpoint.manifest import FILE_NAME, FileEntry, Manifest
from .checkpoint.reading import PartReader, Reader
from .checkpoint.streaming import StreamReader
from .errors import FetchError, ManifestError
from .sidefiles import SKIPPED_FOLDERS, WEIGHTS

logger = init_logger("vllm.sharded_state.remote")

#: The load formats of upstream's `ShardedStateLoader`; the second reads through runai-model-streamer.
STREAMED_FORMAT = "runai_streamer_sharded"
FORMATS = ("sharded_state", STREAMED_FORMAT)


class Location(Protocol):
    """A place that a checkpoint can be read from; `str` of it names it in messages."""

    @property
    def folder(self) -> Path | None:
        """The directory that saves write to, if it is one of this machine."""

    def manifest(self) -> Manifest | None:
        """The manifest, or None where there is none."""

    def names(self) -> list[str]:
        """The names of the files there that may be parts, sorted, whether or not they were fetched."""

    def open(
        self,
        files: Mapping[str, FileEntry | None],
        save_id: str | None = None,
        verify: str = "full",
    ) -> Reader:
        """A reader of `files`, fetched as far as need be; arguments as those of `PartReader`."""


def locate(load_config: Any, model_config: Any) -> Location:
    """Where the checkpoint of an engine lies that is started from sharded state.

    As upstream decides it: `model_weights`, if set, before `model` (vllm/config/model.py sets both for
    object storage); an address in object storage, an existing directory, else a hub id.

    Raises `FetchError` for object storage with another load format than `runai_streamer_sharded`.
    """
    name = str(model_config.model_weights or model_config.model)
    streamed = load_config.load_format == STREAMED_FORMAT
    if store.is_remote(name):
        if not streamed:
            raise FetchError(
                f"{name} lies in object storage.\nUse load_format={STREAMED_FORMAT!r} for it."
            )
        return ObjectStorage(name)
    if Path(name).is_dir():
        return Directory(Path(name), streamed)
    return Repository(
        name,
        model_config.revision,
        load_config.download_dir,
        getattr(model_config, "hf_token", None),
        streamed,
    )


class Directory:
    """A directory of this machine; `streamed` asks for the reader that goes through the streamer."""

    def __init__(self, path: Path, streamed: bool = False) -> None:
        self._path = path
        self._streamed = streamed

    def __str__(self) -> str:
        return str(self._path)

    @property
    def folder(self) -> Path:
        """The directory."""
        return self._path

    def manifest(self) -> Manifest | None:
        """The manifest, or None. Raises `ManifestError`."""
        return manifest.read(self._path)

    def names(self) -> list[str]:
        """The names of the files in the directory."""
        return sorted(path.name for path in self._path.iterdir() if path.is_file())

    def open(
        self,
        files: Mapping[str, FileEntry | None],
        save_id: str | None = None,
        verify: str = "full",
    ) -> Reader:
        """A reader of `files`. Raises `IncompleteError`, or `FetchError` without the streamer."""
        if self._streamed:
            return StreamReader(str(self._path), files, save_id, verify)
        return PartReader(self._path, files, save_id, verify)


class Repository:
    """A repository on a hub, read through its cache; `token` as `huggingface_hub` takes it.

    The commit is that of the manifest's own download, so that parts are never of another one. The cache
    directory, tokens, offline mode and locks between ranks are `huggingface_hub`'s.
    """

    def __init__(
        self,
        name: str,
        revision: str | None,
        cache: str | None = None,
        token: bool | str | None = None,
        streamed: bool = False,
    ) -> None:
        self._name = name
        self._revision = revision
        self._cache = cache
        self._token = token
        self._streamed = streamed
        self._commit: str | None = None

    def __str__(self) -> str:
        return self._name

    @property
    def folder(self) -> None:
        """None: no save writes here."""

    def manifest(self) -> Manifest | None:
        """The manifest, or None where the commit has none. Raises `ManifestError`, `FetchError`."""
        return manifest.read(self._fetch([FILE_NAME]))

    def names(self) -> list[str]:
        """The names of the commit's files; where the hub can't be reached, of those in the cache."""
        from huggingface_hub import HfApi

        folder = self._fetch([FILE_NAME])
        try:
            with _reaching(self._name):
                found = HfApi(token=self._token).list_repo_files(self._name, revision=self._commit)
        except FetchError as error:
            logger.warning("Only what is in the hub's cache is looked at: %s", error)
            return Directory(folder).names()
        return sorted(name for name in found if "/" not in name)

    def open(
        self,
        files: Mapping[str, FileEntry | None],
        save_id: str | None = None,
        verify: str = "full",
    ) -> Reader:
        """A reader of `files`, which are downloaded where the cache lacks them."""
        folder = self._fetch([glob.escape(name) for name in files])
        return Directory(folder, self._streamed).open(files, save_id, verify)

    def _fetch(self, patterns: list[str]) -> Path:
        from huggingface_hub import snapshot_download

        with _reaching(self._name):
            folder = Path(
                snapshot_download(
                    self._name,
                    revision=self._commit or self._revision,
                    cache_dir=self._cache,
                    token=self._token,
                    allow_patterns=patterns,
                )
            )
        self._commit = folder.name
        return folder


class ObjectStorage:
    """A prefix of an `s3://`, `gs://` or `az://` bucket."""

    def __init__(self, address: str) -> None:
        self._address = address.rstrip("/")

    def __str__(self) -> str:
        return self._address

    @property
    def folder(self) -> None:
        """None: no save writes here."""

    def manifest(self) -> Manifest | None:
        """The manifest, or None. Raises `ManifestError`, `FetchError`.

        It is not taken from the directory that upstream pulls configs to: that one is kept from start
        to start, and may hold the manifest of an earlier save.
        """
        with tempfile.TemporaryDirectory(prefix="vss-") as folder:
            if not store.pull(self._address, FILE_NAME, Path(folder)):
                return None
            try:
                return manifest.read(Path(folder))
            except ManifestError as error:
                raise ManifestError(str(error).replace(folder, self._address)) from error

    def names(self) -> list[str]:
        """The names of the safetensors files at the prefix. Raises `FetchError`."""
        return store.part_names(self._address)

    def open(
        self,
        files: Mapping[str, FileEntry | None],
        save_id: str | None = None,
        verify: str = "full",
    ) -> StreamReader:
        """A reader of `files`. Raises `FetchError`, `IncompleteError`."""
        return StreamReader(self._address, files, save_id, verify)


def cached_manifest(
    name: str, revision: str | None, token: bool | str | None = None
) -> Manifest | None:
    """The manifest of a model that is a directory or a hub id; None where none can be had.

    Asked about every model whose config ties embeddings, sharded or not. So a hub is asked once for a
    commit, and one that can't be reached is no error: upstream then decides.
    """
    if Path(name).is_dir():
        return manifest.read(Path(name))
    if store.is_remote(name):
        return None
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    commit = getattr(revision, "resolved", revision)
    try:
        found = try_to_load_from_cache(name, FILE_NAME, revision=commit)
        if found is None:
            found = hf_hub_download(name, FILE_NAME, revision=revision, token=token)
    except Exception as error:  # noqa: BLE001 - a model without a manifest raises too, and most have none
        logger.debug("%s has no %s that can be had: %s", name, FILE_NAME, error)
        return None
    return manifest.read(Path(found).parent) if isinstance(found, str) else None


def local_folder(origin: str, revision: str | None, token: bool | str | None = None) -> Path | None:
    """The directory of a model or tokenizer: itself, or its snapshot in the hub's cache.

    The snapshot gets every file that holds no weights, as far as the hub can be reached. Returns None,
    and warns, where nothing of it is on this machine.
    """
    unwanted = [*WEIGHTS, *(f"{folder}/*" for folder in sorted(SKIPPED_FOLDERS))]
    if Path(origin).is_dir():
        return Path(origin)
    from huggingface_hub import snapshot_download, try_to_load_from_cache

    try:
        with _reaching(origin):
            return Path(
                snapshot_download(origin, revision=revision, token=token, ignore_patterns=unwanted)
            )
    except FetchError as error:
        try:
            found = try_to_load_from_cache(
                origin, "config.json", revision=getattr(revision, "resolved", revision)
            )
        except ValueError:  # no hub id
            found = None
        if isinstance(found, str):
            logger.warning("%s may not be whole on this machine: %s", origin, error)
            return Path(found).parent
        logger.warning("%s is not on this machine, so no files of it are used: %s", origin, error)
        return None


@contextmanager
def _reaching(name: str) -> Iterator[None]:
    """Turn what the hub's client raises into a `FetchError` that names the repository."""
    try:
        yield
    except Exception as error:
        raise FetchError(
            f"{name!r} is no directory, and as a repository on the hub it can't be fetched "
            f"({type(error).__name__}):\n{error}\n"
            "Check the name, the revision, the token and the connection."
        ) from error
