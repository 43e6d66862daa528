"""A transport for the tests, in the place of NCCL and CUDA IPC, which need GPUs.

Tensors come from a file on the worker's machine, through one buffer that is overwritten after each call,
as packed transfers do. The lifecycle is that of vllm/distributed/weight_transfer/nccl_engine.py, on
upstream's own base class. A worker knows the backend `file` once it has imported this module, to which
the worker extension `tests.reload.transport.Extension` leads it.
"""

from dataclasses import dataclass

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor


class Extension:
    """Adds nothing to a worker."""


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    nbytes: int


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """The tensors `names` of `file`; on rank `breaks`, the connection breaks before they come."""

    file: str
    names: list[str]
    breaks: int | None = None


class FileTransferEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        self._buffer = torch.empty(init_info.nbytes, dtype=torch.uint8, device=self.device)

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        if update_info.breaks == self.parallel_config.rank:
            raise ConnectionError("the trainer went away")
        with safe_open(update_info.file, "pt") as file:
            tensors = [file.get_tensor(name) for name in update_info.names]
        flat = [tensor.view(-1).view(torch.uint8) for tensor in tensors]
        packed = torch.cat(flat, out=self._buffer[: sum(map(len, flat))])
        shapes, dtypes = [list(t.shape) for t in tensors], [t.dtype for t in tensors]
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        with disable_mtp_completeness_check():
            self.model.load_weights(
                unpack_tensor(packed, update_info.names, shapes, dtypes, list(map(len, flat)))
            )
        self._buffer.fill_(0xFF)

    def shutdown(self) -> None:
        """Nothing is connected."""


WeightTransferEngineFactory.register_engine("file", FileTransferEngine)
