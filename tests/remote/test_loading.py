"""Whole models, loaded by vLLM's own `get_model` from a hub and a bucket on this machine.

Four processes: ours saves; stock, beside it, saves and shows that it can't use a hub id; ours loads all
that; a model that was loaded is given it. A fifth, left to the full matrix, loads with the hub switched
off.
"""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.reload.steps import Job as ReloadJob
from tests.reload.steps import run_steps
from tests.remote import hub as hubs
from tests.remote.bucket import Bucket
from tests.support.batch import Job, run_batch
from tests.support.lab import WAYS_ONLY, WITH_OURS, Result, Zoo, explain
from tests.support.snapshot import differences
from tests.zoo.kinds import KINDS, TENSORS

pytestmark = pytest.mark.engine

KIND = "llama-kv-head"
STREAMED = "runai_streamer_sharded"
MANIFEST = "sharded_state.json"
PART, HIDDEN = "model-rank-0-part-0.safetensors", "hidden-state-rank-0-part-0.safetensors"
TOKEN = "hf_of_the_test"


def job(name: str, model: str, load_format: str, more: dict[str, Any], **job: Any) -> Job:
    engine = dict(KINDS[KIND].engine) | {"load_format": load_format} | more
    return Job(id=name, model=model, engine=engine, **job)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


class World:
    """The directories, where they are served, and what each process made of them."""

    def __init__(self, root: Path, zoo: Zoo, hub: hubs.Hub, bucket: Bucket) -> None:
        self.root, self.zoo, self.hub, self.bucket = root, zoo, hub, bucket
        self.environment = bucket.environment | {
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(root / "hf"),
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_OFFLINE": "0",
            "VLLM_ASSETS_CACHE": str(root / "assets"),
        }
        source = zoo.path(KIND)
        shutil.copytree(source, root / "stock", ignore=_weights)
        hub.publish("org/stock", root / "stock")  # served as it is when asked for
        ours = [zoo.job(KIND, id="save", save=str(root / "ours"), layout="source")]
        stock = [
            zoo.job(KIND, id="reference", save=str(root / "stock")),
            job("hub", "org/stock", "sharded_state", {}),
        ]
        with ThreadPoolExecutor() as both:
            saving, self.stock = both.map(self.run, (ours, stock), (WITH_OURS, WAYS_ONLY))
        self.saved = saving["save"]
        self._publish()
        self.addresses["source"] = bucket.put(source, "source")
        hub.requests.clear()
        bucket.log.clear()
        self.loads = self.run(self._jobs(), WITH_OURS)
        self.requests, self.reads = list(hub.requests), bucket.read()
        moved = {"mutate": "rewrite_weights"}
        engine = dict(KINDS[KIND].engine) | {"load_format": "dummy"}
        steps = [
            {"path": "org/ours"},
            moved | {"path": self.addresses["ours"]},
            moved | {"path": None},
            moved | {"path": "org/damaged"},
        ]
        self.reloads = run_steps(
            [ReloadJob("reload", str(source), steps, engine)],
            TENSORS,
            WITH_OURS,
            **self.environment,
        )["reload"]

    def run(self, jobs: list[Job], plugins: str, **more: str) -> dict[str, Result]:
        return run_batch(jobs, TENSORS, plugins, **(self.environment | more))

    def publish(self, name: str) -> None:
        self.hub.publish(f"org/{name}", self.root / name)
        self.addresses[name] = self.bucket.put(self.root / name, name)

    def _publish(self) -> None:
        """What was saved, and copies of it that were changed."""
        self.addresses: dict[str, str] = {}
        for rank in ("ours/model-rank-1", "ours/hidden-state-rank-1", "stock/model-rank-1"):
            (self.root / f"{rank}-part-0.safetensors").write_bytes(b"of another rank")
        for name in ("damaged", "cut", "strange", "torn"):
            shutil.copytree(self.root / "ours", self.root / name)
        flip(self.root / "damaged" / PART)
        data = (self.root / "cut" / PART).read_bytes()
        (self.root / "cut" / PART).write_bytes(data[:-5])
        shutil.copy(self.root / "ours" / PART, self.root / "strange" / PART.replace("0.s", "7.s"))
        text = (self.root / "torn" / MANIFEST).read_text()
        (self.root / "torn" / MANIFEST).write_text(text[: len(text) // 2])
        for name in ("ours", "stock", "damaged", "cut", "strange", "torn"):
            self.publish(name)
        self.hub.publish("org/other", self.root / "ours")

    def _jobs(self) -> list[Job]:
        at, again = self.addresses, str(self.root / "again")
        sharded, other = "sharded_state", {"dtype": "float16"}
        return [
            job("hub", "org/ours", sharded, {}, save=f"{again}-hub", layout="source"),
            job("hub stock", "org/stock", sharded, {}),
            job("hub damaged", "org/damaged", sharded, {}),
            job("hub other", "org/other", sharded, other),
            job("hub strange", "org/strange", sharded, {}),
            job("hub cache", "org/ours", sharded, {"download_dir": str(self.root / "elsewhere")}),
            job("s3", at["ours"], STREAMED, {}, save=f"{again}-s3", layout="source"),
            job("s3 stock", at["stock"], STREAMED, {}),
            job("s3 damaged", at["damaged"], STREAMED, {}),
            job("s3 cut", at["cut"], STREAMED, {}),
            job("s3 other", at["ours"], STREAMED, other),
            job("s3 torn", at["torn"], STREAMED, {}),
            job("s3 strange", at["strange"], STREAMED, {}),
            job(
                "s3 source",
                at["source"],
                "runai_streamer",
                {},
                save=f"{again}-source",
                layout="source",
            ),
            job("path", str(self.root / "ours"), STREAMED, {}),
        ]


def _weights(directory: str, names: list[str]) -> list[str]:
    return [name for name in names if "safetensors" in name]


@pytest.fixture(scope="module")
def world(zoo: Zoo, bucket: Bucket, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with hubs.serving() as hub:
        yield World(tmp_path_factory.mktemp("world"), zoo, hub, bucket)


def message(world: World, name: str, kind: str) -> str:
    result = world.loads[name]
    assert result["error"] is not None, f"{name} was loaded"
    assert result["error"]["type"] == kind, explain(result)
    return str(result["error"]["message"])


def fetched(world: World, repo: str) -> set[str]:
    """Names of the safetensors files of which the hub sent content in the third process."""
    return {
        request.path.rpartition("/")[2]
        for request in world.requests
        if request.method == "GET" and request.path.startswith(f"/{repo}/resolve/")
        if request.path.endswith((".safetensors", MANIFEST))
    }


def test_stock_can_not_load_from_a_hub(world):
    assert world.saved["error"] is None, explain(world.saved)
    assert world.stock["reference"]["error"] is None, explain(world.stock["reference"])
    error = world.stock["hub"]["error"]
    assert error is not None
    assert "Could not find checkpoint files" in error["message"]


@pytest.mark.parametrize(
    "name",
    [
        *("hub", "hub stock", "hub cache"),
        *("s3", "s3 stock", "s3 source", "path"),
    ],
)
def test_what_was_saved_comes_back(world, name):
    result = world.loads[name]
    assert result["error"] is None, explain(result)
    assert differences(result["snapshot"], world.stock["reference"]["snapshot"]) == []


def test_a_running_engine_takes_it_from_afar(world):
    assert world.reloads["error"] is None, world.reloads["error"]
    *good, damaged = world.reloads["steps"]
    for step in good:
        assert step["error"] is None, step["error"]["traceback"]
        assert differences(step["snapshot"], world.stock["reference"]["snapshot"]) == []
    assert damaged["error"]["type"] == "IncompleteError"


def test_files_of_other_ranks_are_never_fetched(world):
    hidden = {HIDDEN} if (world.root / "ours" / HIDDEN).exists() else set()
    assert hidden, "the kind was chosen because it has hidden state"
    assert fetched(world, "org/ours") == {MANIFEST, PART} | hidden
    assert fetched(world, "org/stock") == {PART}
    assert not any("rank-1" in request.path for request in world.requests)
    assert {f"ours/{PART}", f"stock/{PART}"} <= world.reads
    assert not any("rank-1" in key for key in world.reads)


def test_the_token_goes_with_each_request(world):
    assert {request.token for request in world.requests} == {TOKEN}


def test_the_cache_directory_is_the_users(world):
    parts = list((world.root / "elsewhere").rglob(PART))
    assert len(parts) == 1


@pytest.mark.parametrize("name", ["hub damaged", "s3 damaged"])
def test_a_damaged_part_is_refused(world, name):
    assert "not what was saved" in message(world, name, "IncompleteError")


@pytest.mark.parametrize("name", ["hub other", "s3 other"])
def test_another_engines_checkpoint_is_refused_before_a_part_is_fetched(world, name):
    assert "model.dtype: saved 'bfloat16', here 'float16'" in message(world, name, "MismatchError")
    assert fetched(world, "org/other") == {MANIFEST}


def test_a_torn_manifest_is_refused_by_its_own_name(world):
    said = message(world, "s3 torn", "ManifestError")
    assert f"{world.addresses['torn']}/{MANIFEST}" in said  # not where it was pulled to


@pytest.mark.parametrize("name", ["hub strange", "s3 strange"])
def test_parts_that_the_manifest_does_not_list_are_refused(world, name):
    assert "model-rank-0-part-7" in message(world, name, "IncompleteError")


def test_an_object_that_was_cut_off_is_named(world):
    assert f"{world.addresses['cut']}/{PART}" in message(world, "s3 cut", "FetchError")


@pytest.mark.parametrize("name", ["hub", "s3", "source"])
def test_an_engine_from_afar_is_saved_as_the_one_from_here(world, name):
    first, again = (
        json.loads((world.root / folder / MANIFEST).read_text())
        for folder in ("ours", f"again-{name}")
    )
    for manifest in (first, again):
        for tensor in manifest["ranks"][0]["tensors"].values():
            del tensor["file"]
    assert again["ranks"][0]["tensors"] == first["ranks"][0]["tensors"]
    side = {p.name for p in (world.root / "ours").iterdir()} - {MANIFEST}
    side = {name for name in side if not name.endswith(".safetensors")}
    assert "config.json" in side
    assert side <= {p.name for p in (world.root / f"again-{name}").iterdir()}


@pytest.mark.full
def test_offline_the_cache_is_enough(world):
    world.hub.requests.clear()
    again = [job("again", "org/ours", "sharded_state", {})]
    result = world.run(again, WITH_OURS, HF_HUB_OFFLINE="1")["again"]
    assert result["error"] is None, explain(result)
    assert differences(result["snapshot"], world.stock["reference"]["snapshot"]) == []
    assert world.hub.requests == []
