"""Repositories on a hub, without a model: what is fetched, at which commit, for which rank."""

import contextlib
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch

from tests.remote import hub as hubs
from tests.support import manifests
from vllm_sharded_state import held, load, remote
from vllm_sharded_state.checkpoint import manifest, staging
from vllm_sharded_state.checkpoint.manifest import FileEntry, Manifest, RankEntry
from vllm_sharded_state.checkpoint.writing import PartWriter
from vllm_sharded_state.errors import FetchError, IncompleteError, ManifestError

REPO = "org/model"


@pytest.fixture
def hub(monkeypatch, tmp_path) -> Any:
    """A hub that this process's `huggingface_hub` takes for the one; its cache is empty."""
    constants = huggingface_hub.constants
    with hubs.serving() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield hub


def part(rank: int, part: Any) -> str:
    return f"model-rank-{rank}-part-{part}.safetensors"


def save(directory: Path, value: float, tied: bool = False, ranks: int = 2) -> Path:
    """A checkpoint of several ranks, each with two parts of one tensor that holds `value` + rank."""
    directory.mkdir()
    entries = []
    for rank in range(ranks):
        writer = PartWriter(directory, lambda n, rank=rank: part(rank, n), 16, 4096)
        for key in ("a", "b"):
            writer.add(key, torch.full((4,), value + rank))
        writer.close()
        writer.commit()
        entries.append(RankEntry(rank, files=dict(writer.files)))
    found = Manifest(
        written_by={},
        save_id=staging.new_id(),
        binding={"world": {"tensor_parallel_size": ranks, "pipeline_parallel_size": 1}},
        tied_word_embeddings=tied,
        ranks=entries,
    )
    manifests.write(directory, found)
    return directory


def engine(load_format: str = "sharded_state", **more: Any) -> tuple[Any, Any]:
    """Those fields of a load and a model config that say where the checkpoint is."""
    fields = {"model": REPO, "model_weights": "", "revision": None, "hf_token": None} | more
    config = SimpleNamespace(load_format=load_format, download_dir=fields.pop("download_dir", None))
    return config, SimpleNamespace(**fields)


def names(rank: int) -> set[str]:
    return {part(rank, 0), part(rank, 1)}


def test_each_rank_fetches_its_own_files(hub, tmp_path):
    hub.publish(REPO, save(tmp_path / "saved", 1.0))
    for rank, token in ((0, "zero"), (1, "one")):
        location = remote.locate(*engine(hf_token=token))
        found = location.manifest()
        reader = location.open(found.rank(rank).files)
        for name in names(rank):
            (key,) = reader.keys(name)
            assert reader.get(name, key).tolist() == [1.0 + rank] * 4
    assert hub.fetched("zero") == names(0) | {manifest.FILE_NAME}
    assert hub.fetched("one") == names(1)  # the manifest was in the cache


def test_ranks_that_start_together_fetch_each_file_once(hub, tmp_path):
    hub.publish(REPO, save(tmp_path / "saved", 1.0))
    failures: list[BaseException] = []

    def start(rank: int) -> None:
        try:
            location = remote.locate(*engine())
            location.open(location.manifest().rank(rank).files)
        except BaseException as error:  # noqa: BLE001 - shown by the assertion below
            failures.append(error)

    threads = [threading.Thread(target=start, args=(rank,)) for rank in (0, 1, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    sent = [r.path for r in hub.requests if r.method == "GET" and r.path.endswith(".safetensors")]
    assert sorted(path.rpartition("/")[2] for path in sent) == sorted(names(0) | names(1))


def test_parts_are_of_the_manifests_commit(hub, tmp_path):
    hub.publish(REPO, save(tmp_path / "first", 1.0))
    location = remote.locate(*engine())
    found = location.manifest()
    hub.publish(REPO, save(tmp_path / "second", 5.0))
    reader = location.open(found.rank(0).files)
    assert reader.get(part(0, 0), "a").tolist() == [1.0] * 4
    assert location.names() == sorted({manifest.FILE_NAME} | names(0) | names(1))


def test_a_revision_is_kept(hub, tmp_path):
    hub.publish(REPO, save(tmp_path / "old", 1.0), "old")
    hub.publish(REPO, save(tmp_path / "new", 5.0))
    for revision, value in (("old", 1.0), (None, 5.0)):
        location = remote.locate(*engine(revision=revision))
        reader = location.open(location.manifest().rank(0).files)
        assert reader.get(part(0, 0), "a").tolist() == [value] * 4


def test_without_a_manifest_only_what_is_opened_is_fetched(hub, tmp_path):
    directory = save(tmp_path / "stock", 1.0)
    (directory / manifest.FILE_NAME).unlink()
    hub.publish(REPO, directory)
    location = remote.locate(*engine())
    assert location.manifest() is None
    assert location.names() == sorted(names(0) | names(1))
    location.open(dict.fromkeys(names(1)))
    assert hub.fetched() == names(1)


def test_a_part_that_the_repository_lacks_is_named(hub, tmp_path):
    directory = save(tmp_path / "saved", 1.0)
    (directory / part(0, 1)).unlink()
    hub.publish(REPO, directory)
    location = remote.locate(*engine())
    with pytest.raises(IncompleteError, match=f"{part(0, 1)} is missing"):
        location.open(location.manifest().rank(0).files)


def test_weights_may_lie_elsewhere_than_the_model(hub, tmp_path):
    hub.publish("org/weights", save(tmp_path / "saved", 3.0))
    location = remote.locate(*engine(model_weights="org/weights"))
    assert str(location) == "org/weights"
    assert location.manifest() is not None


@pytest.mark.parametrize("problem", ["no repository", "no revision", "wrong token", "no hub id"])
def test_what_the_hub_refuses_is_told(hub, tmp_path, problem):
    hub.publish(REPO, save(tmp_path / "saved", 1.0))
    more: dict[str, Any] = {}
    if problem == "no repository":
        more["model"] = "org/none"
    elif problem == "no revision":
        more["revision"] = "none"
    elif problem == "wrong token":
        hub.token, more["hf_token"] = "right", "wrong"
    else:
        more["model"] = str(tmp_path / "none" / "at" / "all")
    with pytest.raises(FetchError, match=more.get("model", REPO)):
        remote.locate(*engine(**more)).manifest()


def test_offline_what_is_in_the_cache_loads_and_the_rest_is_told(hub, tmp_path, monkeypatch):
    hub.publish(REPO, save(tmp_path / "saved", 1.0))
    location = remote.locate(*engine())
    location.open(location.manifest().rank(0).files)
    hub.requests.clear()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    location = remote.locate(*engine())
    found = location.manifest()
    assert names(0) <= set(location.names())
    reader = location.open(found.rank(0).files)
    assert reader.get(part(0, 0), "a").tolist() == [1.0] * 4
    with pytest.raises((FetchError, IncompleteError), match=r"org/model|model-rank-1-part-\d"):
        location.open(found.rank(1).files)
    with pytest.raises(FetchError, match="org/other"):
        remote.locate(*engine(model="org/other")).manifest()
    assert hub.requests == []


def test_offline_a_manifest_that_is_not_cached_is_not_taken_for_absent(hub, tmp_path, monkeypatch):
    """As stock's download leaves the cache: parts, no manifest."""
    hub.publish(REPO, save(tmp_path / "saved", 1.0))
    huggingface_hub.snapshot_download(REPO, allow_patterns=["*.safetensors"])
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FetchError, match=REPO):
        remote.locate(*engine()).manifest()


def test_object_storage_needs_its_load_format():
    with pytest.raises(FetchError, match="runai_streamer_sharded"):
        remote.locate(*engine(model="s3://models/one"))


# --- what a name holds -------------------------------------------------------------


@pytest.mark.parametrize("load_format", ["auto", "dummy", "sharded_state"])
def test_what_a_name_holds_does_not_depend_on_the_load_format(hub, tmp_path, load_format):
    directory = save(tmp_path / "saved", 1.0)
    hub.publish(REPO, directory)
    (tmp_path / "other").mkdir()
    for name in (REPO, str(directory)):
        found = held.sharded_state(*engine(load_format, model=name))
        assert found.manifest == manifest.read(directory)
        with contextlib.closing(found.location.open(dict.fromkeys(names(1)))) as reader:
            assert reader.get(part(1, 0), "a").tolist() == [2.0] * 4
    for name in ("org/other", str(tmp_path / "other")):
        assert held.sharded_state(*engine(load_format, model=name)) is None


# --- word embeddings ---------------------------------------------------------------


def tie(model: str, tied: bool = True, revision: str | None = None) -> bool | None:
    hf_config = SimpleNamespace(tie_word_embeddings=tied)
    return load.retie(SimpleNamespace(model=model, revision=revision, hf_config=hf_config))


@pytest.mark.parametrize("tied", [True, False])
def test_the_manifest_on_a_hub_says_what_is_tied(hub, tmp_path, tied):
    directory = save(tmp_path / "saved", 1.0, tied)
    commit = hub.publish(REPO, directory)
    assert tie(str(directory)) is tied
    assert tie(REPO) is tied
    hub.requests.clear()
    assert tie(REPO, revision=commit) is tied
    assert hub.requests == []  # it was in the cache


def test_an_untied_config_asks_nobody(hub, tmp_path):
    hub.publish(REPO, save(tmp_path / "saved", 1.0, True))
    assert tie(REPO, tied=False) is None
    assert hub.requests == []


def test_a_model_without_a_manifest_is_asked_about_once(hub, tmp_path):
    directory = save(tmp_path / "saved", 1.0)
    (directory / manifest.FILE_NAME).unlink()
    commit = hub.publish(REPO, directory)
    assert tie(REPO, revision=commit) is None
    assert len(hub.requests) == 1
    assert tie(REPO, revision=commit) is None
    assert len(hub.requests) == 1


def test_a_hub_that_can_not_be_reached_decides_nothing(hub, tmp_path):
    assert tie("org/none") is None
    assert tie("s3://models/one") is None
    assert tie("no/hub/id") is None


def test_a_damaged_manifest_decides_nothing_silently(hub, tmp_path):
    directory = save(tmp_path / "saved", 1.0)
    (directory / manifest.FILE_NAME).write_text("{")
    hub.publish(REPO, directory)
    with pytest.raises(ManifestError):
        tie(REPO)


# --- side files ---------------------------------------------------------------


@pytest.fixture
def with_side_files(tmp_path) -> Path:
    directory = save(tmp_path / "model", 1.0)
    for name in (
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "code/modeling.py",
        "original/x",
    ):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(name)
    (directory / "pytorch_model.bin").write_text("weights")
    return directory


def test_side_files_are_fetched_and_weights_are_not(hub, with_side_files):
    hub.publish(REPO, with_side_files)
    folder = remote.local_folder(REPO, None)
    found = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert hub.fetched() == found
    assert found == {"config.json", "tokenizer.json", "chat_template.jinja", "code/modeling.py"}


def test_offline_side_files_are_those_of_the_cache(hub, with_side_files, monkeypatch):
    hub.publish(REPO, with_side_files)
    huggingface_hub.hf_hub_download(REPO, "config.json")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    folder = remote.local_folder(REPO, None)
    assert (folder / "config.json").read_text() == "config.json"
    assert remote.local_folder("org/none", None) is None


def test_the_entry_of_a_part_is_checked_on_the_hubs_copy(hub, tmp_path):
    directory = save(tmp_path / "saved", 1.0)
    hub.publish(REPO, directory)
    wrong = FileEntry(size=(directory / part(0, 0)).stat().st_size, header="0" * 32)
    with pytest.raises(IncompleteError, match=r"header of .*part-0"):
        remote.locate(*engine()).open({part(0, 0): wrong})
