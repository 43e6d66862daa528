"""Load what stock vLLM saved: runtime tensors without a manifest, wherever they are enough.

Stock writes `state_dict()` after processing, and nothing else. Whether that is enough is tried out for
each module on a twin: what processing leaves must either be a tensor of the checkpoint, or not depend
on the weights at all.
"""

import fnmatch
import math
from collections import Counter
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

from .adopt import adopt, can_adopt
from .checkpoint.dtypes import torch_dtype
from .checkpoint.manifest import FILE_NAME
from .errors import (
    IncompleteError,
    NotRepresentableError,
    TensorMismatchError,
    UnexpectedTensorError,
    listed,
)
from .filling import Filling, Origin
from .options import Options
from .progress import Progress
from .remote import Location
from .state import placeholders, units
from .state.kernels import same_bits
from .state.kv_scales import SCALE_BUFFERS, adopt_loaded_scales
from .state.rehearsal import Rehearsal, rehearse
from .state.twin import TwinPool, source_parameters
from .state.units import Unit
from .state.walk import join

#: Shape and dtype of a tensor in a file.
Form = tuple[list[int], torch.dtype]

_AGAIN = (
    "Save it again with vllm-sharded-state installed: start the engine from the model's own checkpoint "
    "and call save_sharded_state."
)


class StockRestorer:
    """Restores one rank's parts as stock vLLM wrote them."""

    def __init__(
        self,
        location: Location,
        pattern: str | None,
        vllm_config: Any,
        options: Options,
        use_tqdm: bool = True,
    ) -> None:
        self._directory = location
        self._strict = options.strict
        self._config = vllm_config
        name = ShardedStateLoader._render_default_pattern(pattern, part="*")
        names = location.names()
        files = fnmatch.filter(names, name)
        if not files:
            raise IncompleteError(_no_files(location, name, names))
        self._reader = location.open(dict.fromkeys(files), verify=options.verify)
        _refuse_lost_manifest([file for file in files if self._reader.is_ours(file)], location)
        places = [(key, file) for file in files for key in self._reader.keys(file)]
        doubled = [key for key, count in Counter(key for key, _ in places).items() if count > 1]
        if doubled:
            raise UnexpectedTensorError(
                f"{location} holds tensors in more than one part, as if two saves were mixed:\n"
                f"{listed(doubled)}\nRemove the parts that are not wanted, or save again."
            )
        self._places = {key: (file, key) for key, file in places}
        self._progress = Progress(self._bytes(), use_tqdm)
        self._filling = Filling(self._reader, self._origin, self._progress)
        self._late: dict[str, set[str]] = {}
        self._early: dict[str, list[str]] = {}

    def close(self) -> None:
        """Close the files, and take the progress bar away."""
        self._progress.close()
        self._reader.close()

    def before_processing(self, model: nn.Module) -> None:
        """Decide for each unit whether its tensors go in before or after processing; fill the former."""
        device = torch.device(self._config.device_config.device)
        pool = TwinPool(self._config, device)
        inside = units.inside(model)
        early: list[tuple[str, torch.Tensor]] = []
        adopted: list[Unit] = []
        problems = _Problems()
        wanted: set[str] = set()
        shared = _shared_keys(model)
        self._rename(model)
        by_owner: dict[str, list[str]] = {}
        for key in self._places:
            by_owner.setdefault(_owner(key), []).append(key)
        for unit in units.split(model):
            leaves = units.leaves(unit, inside)
            own = {key for module in unit.modules for key in by_owner.get(module, ())}
            before = source_parameters(unit)
            if not unit.processed:
                found = self._match(before, own, shared, problems)
                early += [(key, before[key]) for key in found]
            elif can_adopt(unit):
                buffers = {p: x.value for p, x in leaves.items() if _is_scale(p)}
                self._match(dict.fromkeys(buffers), own, shared, problems)
                adopted.append(unit)
                self._late[unit.name] = own
            else:
                rehearsal = self._rehearse(pool, unit, device)
                if rehearsal.is_identity:
                    found = self._match(before, own, shared, problems)
                    early += [(key, before[key]) for key in found]
                    self._early[unit.name] = found
                else:
                    self._check_runtime(unit, rehearsal, own, shared, problems)
                    self._late[unit.name] = own
                    for key, tensor in before.items():
                        if isinstance(tensor, nn.Parameter):
                            placeholders.fill(tensor, key)
            wanted |= own
            if isinstance(unit.root, LinearBase) and problems.lacks(unit.name):
                problems.packed.append(unit.name)
        problems.unexpected += sorted(set(self._places) - wanted)
        problems.refuse(self._directory, self._strict)
        self._filling.fill(early)
        read_scale = self._filling.ahead(
            [key for unit in adopted for key in sorted(self._late[unit.name])]
        )
        for unit in adopted:
            adopt(unit, {key: read_scale(key) for key in sorted(self._late[unit.name])})

    def after_processing(self, model: nn.Module, vllm_config: Any) -> None:
        """Fill the tensors that processing has created, in place."""
        read_again = Filling(self._reader, self._origin).ahead(
            [key for keys in self._early.values() for key in keys]
        )
        fills: list[tuple[str, torch.Tensor]] = []
        scaled: list[Unit] = []
        for unit, leaves in units.all_leaves(model):
            changed = [
                key
                for key in self._early.get(unit.name, ())
                if key not in leaves or not same_bits(leaves[key].value, read_again(key))
            ]
            if changed:
                raise NotRepresentableError(
                    f"{self._directory} was saved by stock vLLM after processing, and processing these "
                    f"tensors again changes them:\n{listed(changed)}\n{_AGAIN}"
                )
            wrong = []
            for key in self._late.get(unit.name, ()):
                leaf = leaves.get(key)
                if leaf is None or not leaf.is_tensor:
                    wrong.append(f"{key}: no place in the model")
                elif not _fits(self._form(key), leaf.value):
                    wrong.append(_forms(key, self._form(key), leaf.value))
                else:
                    fills.append((key, leaf.value))
            if wrong:
                raise TensorMismatchError(
                    f"Tensors in {self._directory} do not fit the model:\n{listed(wrong)}\n{_AGAIN}"
                )
            if any(_is_scale(key) for key in self._late.get(unit.name, ())):
                scaled.append(unit)
        self._filling.fill(fills)
        for unit in scaled:
            adopt_loaded_scales(unit.root)  # stock saves the buffers without their host mirrors
        self._progress.report()

    def _rehearse(self, pool: TwinPool, unit: Unit, device: torch.device) -> Rehearsal:
        try:
            return rehearse(pool, unit, self._config, device)
        except Exception as error:
            raise NotRepresentableError(
                f"{unit.name}: processing placeholders failed ({type(error).__name__}: {error}),\n"
                f"so it can't be told whether {self._directory}, saved by stock, holds enough.\n{_AGAIN}"
            ) from error

    def _origin(self, key: str) -> Origin:
        return (*self._places[key], None)

    def _form(self, key: str) -> Form:
        shape, dtype = self._reader.form(*self._places[key])
        return shape, torch_dtype(dtype)

    def _bytes(self) -> int:
        forms = (self._form(key) for key in self._places)
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in forms)

    def _rename(self, model: nn.Module) -> None:
        """Put each key under its module's first name, where `state_dict()` shows it under several."""
        first = {other: name for name, names in units.all_names(model).items() for other in names}
        self._places = {
            join(first.get(_owner(key), _owner(key)), key.rpartition(".")[2]): place
            for key, place in self._places.items()
        }

    def _match(
        self,
        places: dict[str, torch.Tensor] | dict[str, None],
        own: set[str],
        shared: set[str],
        problems: "_Problems",
    ) -> list[str]:
        """The keys that are in the checkpoint and fit; the others are noted in `problems`."""
        found = []
        for key, place in places.items():
            if key not in own:
                if key not in shared:
                    problems.missing.append(key)
                continue
            form = self._form(key)
            if place is not None and not _fits(form, place):
                if 0 in form[0]:
                    problems.missing.append(key)
                else:
                    problems.wrong.append(_forms(key, form, place))
                continue
            found.append(key)
        return found

    def _check_runtime(
        self,
        unit: Unit,
        rehearsal: Rehearsal,
        own: set[str],
        shared: set[str],
        problems: "_Problems",
    ) -> None:
        problems.unheld += [f"{path} (not in a state dict)" for path in rehearsal.derived]
        problems.unheld += [f"{path} (native code)" for path in rehearsal.captured]
        self._match(rehearsal.tensors, own, shared, problems)


class _Problems:
    def __init__(self) -> None:
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.wrong: list[str] = []
        self.unheld: list[str] = []
        self.packed: list[str] = []

    def lacks(self, unit: str) -> bool:
        """Whether a tensor of `unit` is missing."""
        return any(key.startswith(f"{unit}.") for key in self.missing)

    def refuse(self, directory: object, strict: bool) -> None:
        """Raise for what stands against loading, causes first."""
        if self.unheld:
            raise NotRepresentableError(
                f"{directory} was saved by stock vLLM, which does not save all that this model reads:\n"
                f"{listed(self.unheld)}\n{_AGAIN}"
            )
        if self.wrong:
            raise TensorMismatchError(
                f"Tensors in {directory} have another form than the model:\n{listed(self.wrong)}\n"
                f"They belong to another model, number of ranks or kernel. {_AGAIN}"
            )
        if self.missing and (strict or self.packed):
            cause = (
                "It was saved by stock vLLM on a backend that packs weights away, as the CPU does: "
                "stock leaves those out.\n"
                if self.packed
                else ""
            )
            raise IncompleteError(
                f"Missing keys: the model reads tensors that {directory} does not hold:\n"
                f"{listed(self.missing)}\n{cause}{_AGAIN}"
            )
        if self.unexpected:
            raise UnexpectedTensorError(
                f"Tensors in {directory} have no place in the model:\n{listed(self.unexpected)}\n"
                f"They belong to another model or configuration. {_AGAIN}"
            )


def _owner(key: str) -> str:
    return key.rpartition(".")[0]


def _is_scale(path: str) -> bool:
    return path.rpartition(".")[2] in SCALE_BUFFERS


def _shared_keys(model: nn.Module) -> set[str]:
    """Keys that stock leaves out because another key shows the same tensor, the first in order."""
    first: dict[int, str] = {}
    for key, tensor in sorted(model.state_dict(keep_vars=True).items()):
        first.setdefault(id(tensor), key)
    kept = set(first.values())
    return {key for key in model.state_dict() if key not in kept}


def _fits(form: Form, here: torch.Tensor) -> bool:
    return form == (list(here.shape), here.dtype)


def _forms(key: str, saved: Form, here: torch.Tensor) -> str:
    shape, dtype = saved
    return f"{key}: {shape} {dtype} saved, {list(here.shape)} {here.dtype} here".replace(
        "torch.", ""
    )


def _refuse_lost_manifest(ours: list[str], location: Location) -> None:
    """Raise `IncompleteError` for parts that stock vLLM did not write, and of which no manifest tells.

    Read as what stock saved, they would be loaded without a checksum, and without what is beside them.
    """
    if ours:
        raise IncompleteError(
            f"{location} was saved by vllm-sharded-state, and its {FILE_NAME} is missing; "
            f"there are:\n{listed(ours)}\nCopy it there, or save the model again."
        )


def _no_files(location: Location, name: str, names: list[str]) -> str:
    others = fnmatch.filter(names, "*.safetensors")
    text = f"{location} holds no part {name!r} and no sharded_state.json"
    if others:
        text += f"; it holds:\n{listed(others)}\n"
        text += (
            "Parts of other ranks mean another tensor or pipeline parallel size; other names, another "
            "pattern (model_loader_extra_config), or a checkpoint that was never sharded, which loads "
            "with the default load_format."
        )
    else:
        text += ".\nGive the directory that save_sharded_state wrote."
    return text
