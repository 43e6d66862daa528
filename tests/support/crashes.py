"""Saves that are killed or refused at a chosen operation, and what is found in the directory then.

The operations are those of `os` and `fcntl` that change a directory. They are wrapped where the product
looks them up; `fsync` is counted but not done, because a kill loses nothing that was written. What is
found is read with json and the safetensors library, and with nothing of ours.
"""

import contextlib
import fcntl
import glob
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from vllm_sharded_state import sidefiles
from vllm_sharded_state.checkpoint import manifest, transaction, writing
from vllm_sharded_state.checkpoint.dtypes import dtype_name
from vllm_sharded_state.checkpoint.manifest import Manifest, RankEntry, TensorEntry, UnitEntry
from vllm_sharded_state.checkpoint.ranks import Alone
from vllm_sharded_state.checkpoint.transaction import Written

#: Those that write bytes; the others have their effect at once.
WRITES = ("write", "pwrite")
CHANGES = (
    *("open", "fsync", "rename", "replace", "unlink", "mkdir", "rmdir", "ftruncate", "close"),
    *WRITES,
)

#: What leaves the directory as it is: killed before one of these is killed before the next operation.
NO_CHANGE = ("fsync", "close", "flock")

Tensors = dict[str, torch.Tensor]


class Operations:
    """Calls `at(index, name, args)` before each operation that changes something.

    `at` may kill the process or raise; it may return a number of bytes for a write, which then writes
    only so many and calls `at` again for the rest.
    """

    def __init__(self, at: Callable[[int, str, tuple[Any, ...]], int | None]) -> None:
        self.log: list[tuple[str, str]] = []
        self._at = at

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        saved = {name: getattr(os, name) for name in CHANGES}
        flock = fcntl.flock
        for name, real in saved.items():
            setattr(os, name, self._wrap(name, real))
        fcntl.flock = self._wrap("flock", flock)
        try:
            yield
        finally:
            fcntl.flock = flock
            for name, real in saved.items():
                setattr(os, name, real)

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and not args[1] & (os.O_WRONLY | os.O_RDWR):
                return real(*args, **kwargs)
            index = len(self.log)
            self.log.append((name, str(args[-1] if name in ("rename", "replace") else args[0])))
            if name == "close":  # a descriptor is gone whatever close says
                real(*args, **kwargs)
                self._at(index, name, args)
                return None
            part = self._at(index, name, args)
            if name == "fsync":
                return None
            if part is not None:
                real(args[0], args[1][:part], *args[2:])
                self._at(index, name, args)
                raise AssertionError("the point after a partial write has to end the save")
            return real(*args, **kwargs)

        return operation


def make(seed: int, count: int = 6) -> Tensors:
    """Tensors whose every value tells the seed."""
    tensors = {f"layer.{i}.weight": torch.full((8, 8 + i), 100.0 * seed + i) for i in range(count)}
    return tensors | {"layer.0.bias": torch.tensor([seed], dtype=torch.int8)}


def source(root: Path, text: str) -> Path:
    """A model directory whose side files hold `text`, one of them in a folder."""
    (root / "code").mkdir(parents=True)
    for name in ("config.json", "code/model.py"):
        (root / name).write_text(f"{name} {text}")
    return root


def part_name(part: Any) -> str:
    return f"model-rank-0-part-{part}.safetensors"


def save(directory: Path, tensors: Tensors, model: Path, max_size: int | None = None) -> None:
    """Save as the product does, with tensors in the place of a model."""

    def write(save_id: str) -> Written:
        room = writing.header_room(tensors)
        writer = writing.PartWriter(directory, part_name, max_size, room, save_id)
        entry = RankEntry(0, units={"": UnitEntry("source", None)})
        for key, tensor in tensors.items():
            file, checksum = writer.add(key, tensor)
            shape, dtype = list(tensor.shape), dtype_name(tensor.dtype)
            entry.tensors[key] = TensorEntry(
                file, key, "parameter", dtype, shape, "source", checksum
            )
        writer.close()
        entry.files = writer.files
        sidefiles.stage(model, None, directory, save_id)
        old = {path.name for path in writing.stale_parts(directory, part_name, set())}
        return Written(entry, set(writer.files), old)

    transaction.replace(directory, Alone(), write, describe)


def describe(entries: list[RankEntry], save_id: str) -> bytes:
    """The manifest of tensors that belong to no model."""
    return manifest.encode(
        Manifest(
            written_by={},
            binding={"world": {"tensor_parallel_size": len(entries)}},
            tied_word_embeddings=False,
            ranks=entries,
            save_id=save_id,
        )
    )


def killed(at: Callable[[int, str, tuple[Any, ...]], int | None], work: Callable[[], None]) -> bool:
    """Do `work` in a forked process, whose operations `at` watches; whether it was killed.

    Raises `AssertionError` when it failed in any other way.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with Operations(at).active():
                work()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, "the save failed before the point"
    return False


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def through_manifest(directory: Path) -> Tensors | None:
    """The tensors that the manifest lists, wherever their files lie now; None without a manifest."""
    path = directory / "sharded_state.json"
    if not path.exists():
        return None
    data = json.loads(path.read_text())
    found: Tensors = {}
    for name in data["ranks"][0]["files"]:
        early = directory / f".{name}.{data['save_id']}.tmp"
        found |= load_file(early if early.exists() else directory / name)
    assert found.keys() == data["ranks"][0]["tensors"].keys()
    return found


def as_stock(directory: Path) -> Tensors:
    """What stock vLLM's loop sees: every tensor of the files that match its pattern; none twice."""
    found: Tensors = {}
    for path in sorted(glob.glob(str(directory / "model-rank-0-part-*.safetensors"))):
        tensors = load_file(path)
        assert not found.keys() & tensors.keys(), "one key in two parts"
        found |= tensors
    return found


def equal(one: Tensors | None, other: Tensors | None) -> bool:
    """Whether names and bytes agree."""
    if one is None or other is None:
        return one is other
    return one.keys() == other.keys() and part_of(one, other)


def part_of(some: Tensors, whole: Tensors) -> bool:
    """Whether every tensor of `some` is that of `whole`, to the byte."""
    return all(
        key in whole
        and tensor.dtype == whole[key].dtype
        and tensor.shape == whole[key].shape
        and tensor.numpy().tobytes() == whole[key].numpy().tobytes()
        for key, tensor in some.items()
    )


def names(directory: Path) -> set[str]:
    """Every file and folder below `directory`."""
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}
