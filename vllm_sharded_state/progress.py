"""How far a load has come: a bar in vLLM's style, and the line at its end."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm.auto import tqdm
from vllm.logger import init_logger
from vllm.model_executor.model_loader.weight_utils import _BAR_FORMAT, enable_tqdm

logger = init_logger("vllm.sharded_state.load")

#: The bar's format ends each update's line, so there are only about this many, and some seconds apart.
_UPDATES = 20
_SECONDS = 2.0


class Progress:
    """Bytes read and seconds spent reading in one load of one rank.

    `total` is the number of bytes to read, `use_tqdm` the engine's `LoadConfig.use_tqdm_on_load`. Only
    rank 0 shows a bar, as with upstream's `enable_tqdm`
    (vllm/model_executor/model_loader/weight_utils.py).
    """

    def __init__(self, total: int, use_tqdm: bool) -> None:
        self._total = total
        self._use_tqdm = use_tqdm
        self._bar: tqdm | None = None
        self._bytes = 0
        self._seconds = 0.0

    def __call__(self, count: int) -> None:
        """Note that `count` more bytes have been read."""
        if self._bar is not None:
            # What is read twice, for two places in the model, counts once.
            self._bar.update(max(0, min(count, self._total - self._bytes)))
        self._bytes += count

    @contextmanager
    def reading(self) -> Iterator["Progress"]:
        """Count the seconds in here, and show the bar, which stays open until `close`."""
        if self._bar is None:
            self._bar = tqdm(
                total=self._total,
                desc="Loading sharded state",
                unit="B",
                unit_scale=True,
                unit_divisor=1024,
                miniters=max(1, self._total // _UPDATES),
                mininterval=_SECONDS,
                disable=not enable_tqdm(self._use_tqdm),
                bar_format=_BAR_FORMAT,
            )
        begun = time.perf_counter()
        try:
            yield self
        finally:
            self._seconds += time.perf_counter() - begun

    def close(self) -> None:
        """Take the bar away, after a load that failed too."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def report(self) -> None:
        """Log what was read and how fast. The seconds are those of reading, not of processing."""
        size = self._bytes / 2**30
        logger.info(
            "Loading weights took %.2f seconds (%.2f GiB, %.2f GiB/s)",
            self._seconds,
            size,
            size / self._seconds if self._seconds else 0.0,
        )
