"""What was computed with old weights or scales is never read again, unless the call says `keep`."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.reload.checkpoints import updated
from tests.reload.script import LENGTH, MIDDLE, PROMPTS, Made, Script, run_scripts
from tests.zoo.checkpoint import Checkpoint
from tests.zoo.kinds import KINDS, PACKED

pytestmark = pytest.mark.engine

KIND = KINDS["llama-kv"]
Step = tuple[str, dict[str, Any]]
GENERATE: Step = ("generate", {})


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Checkpoints: `old`; `new`; `scales`, old weights with new KV scales; `part`, which lacks one."""
    root = tmp_path_factory.mktemp("caches")
    old, new = KIND.build(), updated(KIND.build())
    scales = old.tensors | {k: 8 * t for k, t in old.tensors.items() if k.endswith("_scale")}
    part = {k: t for k, t in new.tensors.items() if "layers.1.mlp.up_proj" not in k}
    made = {
        "old": old,
        "new": new,
        "scales": Checkpoint(old.config, scales),
        "part": Checkpoint(old.config, part),
    }
    return {name: str(checkpoint.write(root / name)) for name, checkpoint in made.items()}


@pytest.fixture(scope="module")
def made(paths: dict[str, str]) -> Callable[[str], Made]:
    """Results of one engine of ours, and of stock engines, by the name of a step."""

    def rpc(path: str, **more: Any) -> Step:
        return "rpc", {"weights_path": paths[path], **more}

    ours: dict[str, Step] = {
        "old": GENERATE,
        "new scales": rpc("scales"),
        "with new scales": GENERATE,
        "again": GENERATE,
        "back": rpc("old"),
        "old again": GENERATE,
        "kept": rpc("scales", kv_cache="keep"),
        "with kept blocks": GENERATE,
        "odd": rpc("old", kv_cache="kept"),
        "back again": rpc("old"),
        "fill": GENERATE,
        "old from cache": GENERATE,
        "failing meanwhile": ("meanwhile", {"weights_path": paths["part"]}),
        "old from cache again": GENERATE,
        "update meanwhile": ("meanwhile", {"weights_path": paths["new"]}),
        "new": GENERATE,
        "falls asleep": ("call", {"method": "sleep", "level": 1}),
        "asleep": rpc("old"),
        "half awake": ("call", {"method": "wake_up", "tags": ["weights"]}),
        "while the cache sleeps": rpc("scales"),
        "awake": ("call", {"method": "wake_up"}),
        "after sleep": GENERATE,
    }
    stock: dict[str, Step] = {
        "stock old": GENERATE,
        "stock new scales": rpc("scales"),
        "stock stale": GENERATE,
        "stock reset": ("reset", {}),
        "stock with new scales": GENERATE,
        "stock again": GENERATE,
    }
    engine = dict(KIND.engine)
    results = run_scripts(
        PACKED,
        {
            "ours": Script(paths["old"], engine, list(ours.values())),
            "stock": Script(paths["old"], engine, list(stock.values())),
            "stock scales": Script(paths["scales"], engine, [GENERATE]),
        },
    )
    found = dict(zip(ours, results["ours"], strict=True))
    found |= dict(zip(stock, results["stock"], strict=True))
    found["fresh scales"] = results["stock scales"][0]
    # What a fresh engine says to the prompts and the tokens that were there when new weights came.
    longer = [
        prompt + said["tokens"][:MIDDLE]
        for prompt, said in zip(PROMPTS, found["stock old"]["outputs"], strict=True)
    ]
    rest: Step = ("generate", {"prompts": longer, "length": LENGTH - MIDDLE})
    fresh = run_scripts(PACKED, {"stock new": Script(paths["new"], engine, [rest, GENERATE])})
    found["fresh rest"], found["fresh new"] = fresh["stock new"]
    return lambda name: found[name]


def test_stock_reads_blocks_of_the_old_scales(made: Callable[[str], Made]) -> None:
    assert made("stock new scales")["error"] is None
    assert made("stock with new scales")["outputs"] == made("fresh scales")["outputs"]
    # Both read the prompt's blocks from the cache: in one they are encoded with the old scales.
    assert made("stock stale")["outputs"] != made("stock again")["outputs"]


def test_blocks_are_computed_anew_by_default(made: Callable[[str], Made]) -> None:
    assert made("old")["outputs"] == made("stock old")["outputs"] != made("fresh scales")["outputs"]
    assert made("new scales")["error"] is None
    assert made("with new scales")["outputs"] == made("fresh scales")["outputs"]
    assert made("again")["outputs"] == made("stock again")["outputs"]  # the cache is used again
    assert made("back")["error"] is None
    assert made("old again")["outputs"] == made("old")["outputs"]


def test_keep_keeps_them_as_stock_does(made: Callable[[str], Made]) -> None:
    assert made("kept")["error"] is None
    assert made("with kept blocks")["outputs"] == made("stock stale")["outputs"]


def test_another_choice_is_refused(made: Callable[[str], Made]) -> None:
    error = made("odd")["error"]
    assert error["type"] == "OptionError"
    assert "kv_cache='kept'" in error["message"]


def test_a_failing_reload_does_not_disturb_running_requests(made: Callable[[str], Made]) -> None:
    during = made("failing meanwhile")
    assert during["running"] == len(PROMPTS)
    assert during["error"]["type"] == "ReloadIncompleteError"
    assert during["outputs"] == made("old from cache")["outputs"]
    assert made("old from cache again")["outputs"] == made("old from cache")["outputs"]


def test_running_requests_go_on_with_new_weights(made: Callable[[str], Made]) -> None:
    during = made("update meanwhile")
    assert during["running"] == len(PROMPTS)
    assert during["error"] is None
    for said, before, after in zip(
        during["outputs"],
        made("old from cache")["outputs"],
        made("fresh rest")["outputs"],
        strict=True,
    ):
        assert said["tokens"] == before["tokens"][:MIDDLE] + after["tokens"]
        assert said["logprobs"] == before["logprobs"][:MIDDLE] + after["logprobs"]
    assert made("new")["outputs"] == made("fresh new")["outputs"]


def test_a_sleeping_engine_is_refused_and_one_whose_cache_sleeps_is_not(
    made: Callable[[str], Made],
) -> None:
    """On the CPU falling asleep frees nothing, but the engine's books are the same."""
    assert made("falls asleep")["error"] is None
    error = made("asleep")["error"]
    assert error["type"] == "ReloadAsleepError"
    assert "wake_up(tags=['weights'])" in error["message"]
    assert made("half awake")["error"] is None
    assert made("while the cache sleeps")["error"] is None
    assert made("awake")["error"] is None
    assert made("after sleep")["outputs"] == made("fresh scales")["outputs"]
