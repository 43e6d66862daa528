"""A real engine of two ranks that a trainer sends weights to, through vLLM's own worker methods.

    python -m tests.reload.update_engine GIVEN.json MADE.json

Its steps: the weights it was started with; an update that breaks on the last rank alone, and is finished
all the same; one that is finished too early; one that is never finished; and one that is.
"""

import vss_test_ways

vss_test_ways.keep_out()  # Before anything imports vLLM; spawned workers import this module too.

import dataclasses  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from tests.support.engine import Spec, outputs  # noqa: E402
from tests.support.model_level import COMMON  # noqa: E402
from tests.support.process import serve  # noqa: E402


@dataclasses.dataclass
class Given:
    """Start from `model`; send `new`, a checkpoint in one file, unless it is None."""

    model: str
    engine: dict[str, Any]
    new: str | None = None
    ranks: int = 2


def _error(llm: Any, method: str, **kwargs: Any) -> str | None:
    try:
        llm.collective_rpc(method, kwargs=kwargs)
    except Exception as error:  # noqa: BLE001 - every failure is a result here
        return f"{type(error).__name__}: {error}"
    return None


def run(given: Given) -> dict[str, Any]:
    from safetensors import safe_open
    from vllm import LLM
    from vllm.config.weight_transfer import WeightTransferConfig

    llm = LLM(
        given.model,
        **(COMMON | {"max_num_seqs": 4} | given.engine),
        tensor_parallel_size=given.ranks,
        distributed_executor_backend="mp",
        weight_transfer_config=WeightTransferConfig(backend="file"),
        worker_extension_cls="tests.reload.transport.Extension",
    )

    def said() -> Any:
        llm.reset_prefix_cache()
        return outputs(llm, Spec(given.model))

    result: dict[str, Any] = {"old": said()}
    if given.new is None:
        return result
    (file,) = map(str, Path(given.new).glob("*.safetensors"))
    with safe_open(file, "pt") as opened:
        names = list(opened.keys())
    third = len(names) // 3
    first, *rest = (
        {"file": file, "names": names[i : i + third]} for i in range(0, len(names), third)
    )
    size = Path(file).stat().st_size
    llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {"nbytes": size}})

    llm.collective_rpc("start_weight_update")
    llm.collective_rpc("update_weights", kwargs={"update_info": first})
    broken = rest[0] | {"breaks": given.ranks - 1}
    result["broken"] = _error(llm, "update_weights", update_info=broken)
    result["after broken"] = said()
    result["finished broken"] = _error(llm, "finish_weight_update")

    llm.collective_rpc("start_weight_update")
    llm.collective_rpc("update_weights", kwargs={"update_info": first})
    result["finished early"] = _error(llm, "finish_weight_update")
    result["after early"] = said()

    llm.collective_rpc("start_weight_update")
    llm.collective_rpc("update_weights", kwargs={"update_info": first})
    result["between"] = said()
    llm.collective_rpc("start_weight_update")
    for chunk in (first, *rest):
        llm.collective_rpc("update_weights", kwargs={"update_info": chunk})
    llm.collective_rpc("finish_weight_update")
    result["new"] = said()
    return result


if __name__ == "__main__":
    serve(lambda **fields: run(Given(**fields)))
