"""Let a checksum of the weights in an engine cover all that it computes with.

What: `vllm.v1.worker.worker_base.WorkerWrapperBase.compute_weight_checksums`, which upstream hands on to
    the worker.

Why: upstream's checksums cover parameters alone. KV scales, their host mirrors, hidden tensors and
    weights that a kernel has packed are not among them: engines that compute different things agree.

How: with `state=True` the method returns `state.digest.state_digest` of this rank's model instead.
    Without it nothing changes.

Since: vLLM 0.32 (seen in 0.32).

Until: upstream's checksums cover buffers, host mirrors, hidden tensors and packed weights.
"""

from types import SimpleNamespace
from typing import Any

from vllm_sharded_state.patches.contract import Function, Patch
from vllm_sharded_state.patches.inward import inward, stand_in


def make(original: Function) -> Function:
    """Return the method with an argument `state`."""

    def compute_weight_checksums(self: Any, state: bool = False) -> dict[str, Any]:
        if not state:
            checksums: dict[str, Any] = original(self)
            return checksums
        digest: dict[str, Any] = inward("state.digest", "state_digest")(
            self.worker.get_model(), self.worker.vllm_config
        )
        return digest

    return compute_weight_checksums


def probe() -> bool:
    """Ask the wrapper of a toy for all; is the worker asked for parameters alone?"""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    wrapper = WorkerWrapperBase.__new__(WorkerWrapperBase)
    wrapper.worker = SimpleNamespace(
        compute_weight_checksums=lambda **_: {}, get_model=lambda: None, vllm_config=None
    )
    with stand_in("state.digest", "state_digest", lambda *_: {"state": ""}):
        return "state" not in wrapper.compute_weight_checksums(state=True)


PATCH = Patch(
    name="worker_weight_checksums",
    module="vllm.v1.worker.worker_base",
    symbol="WorkerWrapperBase.compute_weight_checksums",
    probe=probe,
    make=make,
    handed_on=True,
)
