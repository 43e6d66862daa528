"""The undo log by itself, coverage of writes, and who may reload when."""

import pytest
import torch

from vllm_sharded_state.errors import (
    ReloadBrokenError,
    ReloadBusyError,
    ReloadRoomError,
    ReloadScaleError,
)
from vllm_sharded_state.reload import entry, undo
from vllm_sharded_state.reload.validate import may_become, refuse_bad_values
from vllm_sharded_state.state.coverage import Coverage

COPY = torch.ops.aten.copy_.default


def test_bytes_and_values_come_back_where_they_were() -> None:
    log = undo.UndoLog()
    memory = torch.arange(24.0)
    strided = memory.view(4, 6).t()[1::2]
    before, address = memory.clone(), strided.data_ptr()
    held = {"value": "old"}
    log.keep_tensor(strided)
    log.keep_value(lambda old: held.update(value=old), held["value"])
    strided.fill_(-1.0)
    held["value"] = "new"
    log.keep_tensor(strided)  # a second time: the first content is the old one
    strided.fill_(-2.0)
    assert log.nbytes == strided.nbytes
    log.roll_back()
    assert torch.equal(memory, before)
    assert strided.data_ptr() == address
    assert held == {"value": "old"}
    assert log.nbytes == 0


def test_an_exchange_keeps_the_old_bytes_in_the_new_memory() -> None:
    log = undo.UndoLog()
    size = 3 * undo._PIECE // 4 + 5  # bf16: one piece and a half, and a little
    old, new = torch.randn(size).bfloat16(), torch.randn(size).bfloat16()
    live, wanted, address = old.clone(), new.clone(), new.data_ptr()
    log.exchange(live, new)
    assert torch.equal(live, wanted)
    assert torch.equal(new, old)
    assert new.data_ptr() == address
    log.roll_back()
    assert torch.equal(live, old)


def test_an_exchange_that_is_interrupted_can_be_taken_back() -> None:
    class Interrupted(torch.utils._python_dispatch.TorchDispatchMode):
        """Raises at copy number `left`, counted from the first."""

        def __init__(self, left: int) -> None:
            super().__init__()
            self.left = left

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func is COPY:
                self.left -= 1
                if self.left == 0:
                    raise KeyboardInterrupt
            return func(*args, **(kwargs or {}))

    size = undo._PIECE  # float32: four pieces, of three copies each
    for number in range(1, 13):
        log, old = undo.UndoLog(), torch.randn(size)
        live, new = old.clone(), torch.randn(size)
        with pytest.raises(KeyboardInterrupt), Interrupted(number):
            log.exchange(live, new)
        log.roll_back()
        assert torch.equal(live, old), number


def test_what_was_forgotten_does_not_come_back() -> None:
    log, tensor = undo.UndoLog(), torch.zeros(3)
    log.keep_tensor(tensor)
    tensor.fill_(1.0)
    log.forget()
    log.roll_back()
    assert torch.equal(tensor, torch.ones(3))


def test_a_step_that_fails_spoils_no_other_and_is_told() -> None:
    log, tensor = undo.UndoLog(), torch.zeros(3)

    def broken(_: object) -> None:
        raise RuntimeError("the device is gone")

    log.keep_tensor(tensor)
    tensor.fill_(1.0)
    log.keep_value(broken, None)
    with pytest.raises(ReloadBrokenError, match="the device is gone"):
        log.roll_back()
    assert torch.equal(tensor, torch.zeros(3))


def test_a_log_that_outgrows_the_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(undo, "_available", lambda: 100)
    log = undo.UndoLog()
    log.keep_tensor(torch.zeros(22))
    with pytest.raises(ReloadRoomError):
        log.keep_tensor(torch.zeros(23))
    undo.require_room(90)
    with pytest.raises(ReloadRoomError):
        undo.require_room(91)


def test_one_reload_at_a_time() -> None:
    model, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    entry.claim(model, "first")
    entry.claim(other, "first")
    with pytest.raises(ReloadBusyError, match="first"):
        entry.claim(model, "second")
    entry.release(model)
    entry.claim(model, "third")
    entry.release(model)
    entry.release(other)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -0.5, 0.0, -0.0])
def test_what_is_no_scale(value: float) -> None:
    with pytest.raises(ReloadScaleError, match="a name"):
        refuse_bad_values(torch.tensor([1.0, value]), "a name", zero=False)
    refuse_bad_values(torch.tensor([1.0, 1e-30]), "a name", zero=False)


def test_dtypes_that_a_loader_may_convert() -> None:
    assert may_become(torch.float32, torch.bfloat16)
    assert may_become(torch.int32, torch.int64)
    assert may_become(torch.uint8, torch.float8_e8m0fnu)
    assert not may_become(torch.int8, torch.bfloat16)
    assert not may_become(torch.bfloat16, torch.float8_e4m3fn)
    assert not may_become(torch.float8_e4m3fn, torch.bfloat16)
    assert not may_become(torch.bool, torch.int8)


def test_coverage_counts_each_element_once() -> None:
    tensor = torch.empty(4, 6, device="meta")
    coverage = Coverage(tensor)
    for rows in (tensor[:2], tensor[:2]):
        coverage.note(COPY, rows)
    assert coverage.written == tensor.numel()
    assert not coverage.is_whole()
    coverage.note(COPY, tensor[2:])
    assert coverage.is_whole()
    assert not coverage.at_once


def test_coverage_of_columns() -> None:
    tensor = torch.empty(4, 6, device="meta")
    coverage = Coverage(tensor)
    coverage.note(COPY, tensor[:, :5])
    coverage.note(COPY, tensor[:, 4:5])
    assert coverage.written == tensor.numel()
    assert not coverage.is_whole()
    coverage.note(COPY, tensor[:, 5:])
    assert coverage.is_whole()


def test_coverage_of_a_write_that_hides_what_it_writes() -> None:
    tensor = torch.empty(4, 6, device="meta")
    coverage = Coverage(tensor)
    coverage.note(torch.ops.aten.index_put_.default, tensor)
    assert not coverage.is_whole()


def test_coverage_leaves_out_declared_padding() -> None:
    tensor = torch.empty(4, 6, device="meta")
    tensor.weight_loader_numel = 12  # type: ignore[attr-defined]
    coverage = Coverage(tensor)
    coverage.note(COPY, tensor[:1])
    assert not coverage.is_whole()
    coverage.note(COPY, tensor[1:2])
    assert coverage.is_whole()
