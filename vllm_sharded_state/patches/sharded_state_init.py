"""Take the options of this package in `model_loader_extra_config`.

What: `vllm.model_executor.model_loader.sharded_state_loader.ShardedStateLoader.__init__`

Why: upstream knows the key `pattern` only and raises on every other one.

How: `load.take_options` takes our keys out and raises on unknown ones, listed sorted; upstream's
    `__init__` runs on the rest. The options are kept in `self.vss_options`. The formats
    `sharded_state` and `runai_streamer_sharded` share the class, and the options.

Since: vLLM 0.32 (seen in 0.32 and 0.33; the file is the same in both).

Until: upstream's loader has the keys `strict` and `layout`.
"""

from typing import Any

from vllm_sharded_state.patches.contract import Function, Patch
from vllm_sharded_state.patches.inward import inward, stand_in


def make(original: Function) -> Function:
    """Return `ShardedStateLoader.__init__` with the options of this package."""

    def __init__(self: Any, load_config: Any) -> None:
        """Make a loader of per-rank checkpoints.

        Keys of `load_config.model_loader_extra_config`:

        - `pattern` (upstream's): name of the part files, with the fields `{rank}` or `{tp_rank}`,
          `{pp_rank}` and `{part}`.
        - `strict` (bool, default true): a tensor that the model reads and the checkpoint lacks is
          an error. If false, such tensors get zeros, or 1.0 for scales, and one warning lists them.
          A wrong shape, dtype or layout is an error either way.
        - `layout` (`auto`, `runtime` or `source`): layout of modules when this engine saves; where
          it is missing, `VSS_LAYOUT` decides.
        - `verify` (`full`, `size` or `off`, default `full`): what is compared while loading:
          checksums of all bytes; only sizes and headers of files; or neither.

        Raises:
            ValueError: another key, or a value that means nothing.
        """
        upstream_config, options = inward("load", "take_options")(load_config)
        original(self, upstream_config)
        self.vss_options = options

    return __init__


def probe() -> bool:
    """Make a loader with the key `strict`; is it refused?"""
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

    plain = LoadConfig(load_format="sharded_state")
    with_option = LoadConfig(
        load_format="sharded_state", model_loader_extra_config={"strict": True}
    )
    with stand_in("load", "take_options", lambda load_config: (plain, "taken")):
        try:
            loader = ShardedStateLoader(with_option)
        except ValueError:
            return True
    return getattr(loader, "vss_options", None) != "taken"


PATCH = Patch(
    name="sharded_state_init",
    module="vllm.model_executor.model_loader.sharded_state_loader",
    symbol="ShardedStateLoader.__init__",
    probe=probe,
    make=make,
)
