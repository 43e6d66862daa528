"""Object storage through `runai-model-streamer`: what lies at a prefix, and ranges of its files.

The streamer reads from `s3://`, `gs://` and `az://`, and from paths, many ranges at a time. It is an
extra of vLLM's (`vllm[runai]`), so it is imported only when asked for.
"""

import glob
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from vllm_sharded_state.errors import FetchError

#: Bytes that one call of the streamer covers at most, unless one range is larger: all of a call may
#: lie in its buffers. The user's RUNAI_STREAMER_MEMORY_LIMIT holds as well.
BATCH = 512 << 20

#: Path or address of a file, first byte, last byte + 1.
Range = tuple[str, int, int]


def is_remote(path: str) -> bool:
    """Whether `path` is in object storage, as `runai-model-streamer` knows it."""
    return path.lower().startswith(("s3://", "gs://", "az://"))


def pull(base: str, name: str, target: Path) -> bool:
    """Copy the file `name` at the prefix `base` of an object store into the directory `target`.

    Returns whether there is such a file. Raises `FetchError`.
    """
    _streamer()
    from runai_model_streamer import pull_files

    key = base.split("://", 1)[1].partition("/")[2].strip("/")
    pattern = glob.escape(f"{key}/{name}" if key else name)
    with _fetching(f"{base.rstrip('/')}/{name}"):
        pull_files(f"{base.rstrip('/')}/", str(target), [pattern], None)
    return (target / name).is_file()


def part_names(base: str) -> list[str]:
    """The names of all safetensors files at the prefix `base` of an object store. Raises `FetchError`."""
    _streamer()
    from runai_model_streamer import list_safetensors

    with _fetching(base):
        return sorted(path.rpartition("/")[2] for path in list_safetensors(base))


def _streamer() -> tuple[Any, Any]:
    """The streamer's class, and how to ask for ranges that follow each other in one file."""
    try:
        from runai_model_streamer import FileChunks, FileStreamer
    except ImportError as error:
        raise FetchError(
            "load_format='runai_streamer_sharded' needs the package runai-model-streamer, as upstream "
            f"does ({error}).\nInstall it: pip install 'vllm[runai]'."
        ) from error
    # Until 0.16 the constructor takes what `contiguous` takes since.
    return FileStreamer, getattr(FileChunks, "contiguous", FileChunks)


def read(ranges: Sequence[Range]) -> Iterator[tuple[Range, torch.Tensor]]:
    """Each range with its bytes (uint8, one dimension, on the CPU), in the order they come in.

    The bytes are valid until the next range is asked for. `ranges` are sorted. Raises `FetchError`.
    """
    empty = torch.empty(0, dtype=torch.uint8)
    yield from ((span, empty) for span in ranges if span[1] == span[2])
    full = [span for span in ranges if span[1] < span[2]]
    if not full:
        return
    streamer, chunks = _streamer()
    with streamer() as stream:
        for batch in _batches(full):
            yield from _read_batch(stream, chunks, batch)


def _read_batch(
    stream: Any, chunks: Any, batch: Sequence[Range]
) -> Iterator[tuple[Range, torch.Tensor]]:
    runs = _runs(batch)
    files = ", ".join(sorted({path for path, _, _ in batch}))
    with _fetching(files):
        stream.stream_files(
            [
                chunks(index, run[0][0], run[0][1], [end - start for _, start, end in run])
                for index, run in enumerate(runs)
            ]
        )
        answers = iter(stream.get_chunks())
    for _ in batch:
        with _fetching(files):
            answer = next(answers, None)
            if answer is None:
                raise ValueError("less came in than was asked for")
        index, chunk, data = answer
        yield runs[index][chunk], data.reshape(-1)
    with _fetching(files):
        if next(answers, None) is not None:  # asked, so that the streamer gives its buffers back
            raise ValueError("more came in than was asked for")


def _batches(spans: Sequence[Range]) -> Iterator[list[Range]]:
    batch: list[Range] = []
    total = 0
    for span in spans:
        size = span[2] - span[1]
        if batch and total + size > BATCH:
            yield batch
            batch, total = [], 0
        batch.append(span)
        total += size
    yield batch


def _runs(spans: Sequence[Range]) -> list[list[Range]]:
    """`spans` (sorted), split where one does not follow the one before it in the same file."""
    runs: list[list[Range]] = []
    for span in spans:
        if runs and runs[-1][-1][0] == span[0] and runs[-1][-1][2] == span[1]:
            runs[-1].append(span)
        else:
            runs.append([span])
    return runs


@contextmanager
def _fetching(what: str) -> Iterator[None]:
    """Turn whatever the streamer raises into a `FetchError` that names the files."""
    try:
        yield
    except Exception as error:
        raise FetchError(
            f"runai-model-streamer can't read {what}:\n{error}\n"
            "Check that the files are there and whole, and the store's address and credentials."
        ) from error
