"""Nothing is silent: what does not belong into the model is refused, by name, before it does harm."""

from pathlib import Path

import pytest

from tests.silent_cases import CASES, scale_key
from tests.support import edit
from tests.support.batch import Job, run_batch
from tests.support.lab import WITH_OURS, Result, Zoo, explain, sharded, without_ours
from tests.support.snapshot import differences
from tests.zoo.kinds import PACKED, TENSORS

pytestmark = pytest.mark.engine

KIND = "llama-kv-head"
BASES = [(PACKED, "auto"), (TENSORS, "runtime"), (TENSORS, "source")]
KV_DTYPE = "another KV-cache dtype"
LENIENT = {"model_loader_extra_config": {"strict": False}}
#: Parts of at most this many bytes: several of them.
PART = 256 * 1024


class Bench:
    """One way and layout: the reference, a saved directory, and every spoiled copy of it loaded."""

    def __init__(self, way: str, layout: str, zoo: Zoo, root: Path) -> None:
        self.way, self.layout, self.zoo, self.root = way, layout, zoo, root
        self.saved = root / "saved"
        self.single = root / "single"
        (self.reference,) = run_batch([zoo.job(KIND)], way, without_ours(way)).values()
        saves = {
            "parts": zoo.job(KIND, save=str(self.saved), layout=layout, max_size=PART),
            "single": zoo.job(KIND, save=str(self.single), layout=layout),
            # A second, smaller save into a directory that has parts of an earlier one.
            "over": zoo.job(KIND, save=str(root / "over"), layout=layout, max_size=PART),
            "over again": zoo.job(KIND, save=str(root / "over"), layout=layout, snapshot=False),
        }
        for name, job in saves.items():
            job.id = name
        self.saves = run_batch(saves.values(), way, WITH_OURS)
        for name, result in self.saves.items():
            assert result["error"] is None, f"{name}: {explain(result)}"
        self.loads = run_batch(self._jobs(), way, WITH_OURS)

    def _jobs(self) -> list[Job]:
        jobs = [
            self._load("untouched", self.saved),
            self._load("poisoned", self.saved, poison=True),
            self._load("over", self.root / "over"),
        ]
        for number, (name, case) in enumerate(CASES.items()):
            directory = edit.copy(self.saved, self.root / f"case{number}")
            case.change(directory)
            jobs.append(self._load(name, directory, **case.engine))
            if "model_loader_extra_config" not in case.engine:
                engine = dict(case.engine) | LENIENT
                jobs.append(self._load(f"lenient {name}", directory, **engine))
        return jobs

    def _load(self, name: str, directory: Path, poison: bool = False, **engine: object) -> Job:
        job = sharded(KIND, directory, id=name, poison=poison)
        job.engine |= engine
        return job


@pytest.fixture(scope="module", params=BASES, ids=lambda base: "-".join(base))
def bench(
    request: pytest.FixtureRequest, zoo: Zoo, tmp_path_factory: pytest.TempPathFactory
) -> Bench:
    way, layout = request.param
    return Bench(way, layout, zoo, tmp_path_factory.mktemp(f"silent-{way}-{layout}"))


def _refused(result: Result, words: tuple[str, ...]) -> None:
    assert result["error"] is not None, "it was loaded"
    assert result["error"]["stage"] == "load"
    # An error made on purpose, not one that happened.
    assert "ShardedStateError" in result["error"]["bases"], explain(result)
    for word in words:
        assert word in result["error"]["message"]


def test_an_untouched_directory_loads(bench: Bench) -> None:
    assert len(edit.parts(bench.saved)) > 2
    untouched = bench.loads["untouched"]
    assert untouched["error"] is None, explain(untouched)
    assert differences(untouched["snapshot"], bench.reference["snapshot"]) == []


@pytest.mark.parametrize("name", CASES)
def test_a_spoiled_directory_is_refused_by_name(bench: Bench, name: str) -> None:
    if name == KV_DTYPE and bench.layout == "source":
        # Nothing in it depends on the cache; that vLLM has no e5m2 for this model is its own word.
        assert bench.loads[name]["error"] is not None
        return
    _refused(bench.loads[name], CASES[name].words)


@pytest.mark.parametrize(
    "name", [n for n, c in CASES.items() if "model_loader_extra_config" not in c.engine]
)
def test_strict_false_forgives_missing_tensors_and_nothing_else(bench: Bench, name: str) -> None:
    case, result = CASES[name], bench.loads[f"lenient {name}"]
    if name == KV_DTYPE and bench.layout == "source":
        assert result["error"] is not None
        return
    if not case.forgiven:
        _refused(result, case.words)
        return
    assert result["error"] is None, explain(result)
    said = [line for line in result["warnings"] if case.words[0] in line]
    assert len(said) == 1, "one warning that lists what is missing"
    changed = differences(result["snapshot"], bench.reference["snapshot"])
    assert changed, "the missing tensor was found somewhere"
    layer = ".layers.1.self_attn"
    assert all(layer in line for line in changed), changed
    assert not [path for path, t in result["snapshot"]["tensors"].items() if t["nan"]]


def test_a_missing_scale_is_one(bench: Bench) -> None:
    result = bench.loads["lenient a scale is gone, unlisted"]
    floats = {
        path: value
        for path, value in result["snapshot"]["numbers"].items()
        if "layers.1." in path and path.endswith("_k_scale_float")
    }
    (line,) = [line for line in result["warnings"] if scale_key(bench.saved) in line]
    assert f"{scale_key(bench.saved)} = 1.0" in line
    assert set(floats.values()) == {(1.0).hex()}, "the scale's host mirror says the same"


def test_no_poison_is_left(bench: Bench) -> None:
    """Every parameter was NaN when loading began."""
    poisoned = bench.loads["poisoned"]
    assert poisoned["error"] is None, explain(poisoned)
    assert not [path for path, t in poisoned["snapshot"]["tensors"].items() if t["nan"]]
    assert differences(poisoned["snapshot"], bench.reference["snapshot"]) == []


def test_a_save_over_an_earlier_one_leaves_none_of_it(bench: Bench) -> None:
    assert len(edit.parts(bench.root / "over")) == 1
    over = bench.loads["over"]
    assert over["error"] is None, explain(over)
    assert differences(over["snapshot"], bench.reference["snapshot"]) == []
