"""Model to directory: the state of one rank, unit by unit, and the manifest when all ranks are done."""

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.logger import init_logger
from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

from . import busy, held, identity, options, publish
from .checkpoint import manifest, transaction
from .checkpoint.dtypes import dtype_name, holds
from .checkpoint.manifest import RankEntry, SideFile, TensorEntry, UnitEntry, ValueEntry
from .checkpoint.transaction import Written
from .checkpoint.writing import PartWriter, header_room, stale_parts
from .errors import OptionError, SaveError
from .mirrors import refuse_disagreement
from .saved_source import SavedSource
from .source_identity import Recorder
from .state import construction, kernels, plain, sharing, units
from .state.compare import place
from .state.layout import Chooser
from .state.process import load_device
from .state.source import SourceReader
from .state.twin import Twin
from .state.unit_state import Source, UnitState
from .state.walk import Kind, Leaf
from .stock_keys import StockKeys

logger = init_logger("vllm.sharded_state.save")

#: Bytes of header to leave in a file of hidden state, of which there is little.
_HEADER = 1 << 20

#: Bytes of header to leave in the smallest parts.
_SMALL_HEADER = 1 << 16


def save_model(
    model: nn.Module, path: str, pattern: str | None = None, max_size: int | None = None
) -> None:
    """Save this rank's state of `model` to the directory `path`; every rank calls it.

    `pattern` names the part files as upstream's loader does, `max_size` (bytes) starts another part.
    The manifest is published by rank 0 once every rank has written its own.

    Raises `ShardedStateError`: `NotRepresentableError`, `StaleSourceError` or `NoSourceError` name the
    module that can't be saved exactly; `SaveError` tells what went wrong with the directory;
    `ReloadBusyError` that the model is taking new weights.
    """
    model = model.unwrap() if hasattr(model, "unwrap") else model
    busy.refuse(model)
    directory = Path(path)
    built = construction.recall(model)
    ranks = publish.ranks()
    first = _OfRankZero()

    def write(save_id: str) -> Written:
        if built is None:
            raise SaveError(
                "The model was built before vllm-sharded-state was active in this process, so what it "
                "was loaded from is not known.\nStart the engine with the plugin enabled, and save again."
            )
        if ranks.rank == 0:
            first.source = publish.record_source(built.vllm_config)
        saver = _RankSaver(model, built, directory, pattern, max_size, save_id)
        entry = saver.save()
        if ranks.rank == 0:
            first.side_files = publish.stage_side_files(directory, built.vllm_config, save_id)
        return Written(entry, set(entry.files), saver.replaced())

    def describe(entries: list[RankEntry], save_id: str) -> bytes:
        assert built is not None
        assert first.source is not None
        source = first.source.result()
        return publish.describe(built.vllm_config, entries, save_id, source, first.side_files)

    transaction.replace(directory, ranks, write, describe)


@dataclass
class _OfRankZero:
    """What rank 0 alone contributes to the manifest."""

    source: Recorder | None = None
    side_files: dict[str, SideFile] = field(default_factory=dict)


class _RankSaver:
    """Saves one rank. Tensors go to disk unit by unit, as soon as their layout is known."""

    def __init__(
        self,
        model: nn.Module,
        built: construction.Construction,
        directory: Path,
        pattern: str | None,
        max_size: int | None,
        save_id: str,
    ) -> None:
        self._config: Any = built.vllm_config
        self._model = model
        self._initial = built.initial
        self._keys = built.keys
        self._directory = directory
        self._rank = identity.rank()
        self._entry = RankEntry(self._rank)
        self._part_name = _part_name(pattern, max_size is not None)
        self._hidden_name = _hidden_name(self._rank, self._part_name)
        self._wanted = options.layout_to_save(self._config.load_config)
        self._max_size = max_size
        self._save_id = save_id
        self._paths: dict[tuple[Any, ...], str] = {}
        self._free: dict[str, tuple[Leaf, PartWriter, bool]] = {}
        self._beyond_source = False
        self._writers: list[PartWriter] = []

    def save(self) -> RankEntry:
        """Write every unit; returns the rank's entry of the manifest."""
        identity.refuse_ambiguous_ranks(self._config)
        states = list(units.all_leaves(self._model))
        every_leaf = {path: leaf for _, leaves in states for path, leaf in leaves.items()}
        refuse_disagreement(every_leaf)
        self._leaves = every_leaf.values()
        self._live = {id(leaf.value) for leaf in every_leaf.values() if leaf.is_tensor}
        self._stock_keys = StockKeys(self._model, every_leaf.values())
        tensors = [path for path, leaf in every_leaf.items() if leaf.is_tensor]
        room = header_room([*tensors, *self._keys, manifest.STOCK_STOP])
        self._main = self._writer(self._part_name, room)
        self._hidden = self._writer(self._hidden_name, min(room, _HEADER))
        self._writers = [self._main, self._hidden]
        device = load_device(self._config)
        self._entry.kernel_environment = kernels.environment(device)
        chooser = Chooser(self._config, device, self._initial, self._wanted, self._source)
        try:
            for unit, leaves in states:
                self._write(chooser.choose(unit, leaves))
            self._write_free()
            self._stop_stock()
            for writer in self._writers:
                writer.close()
        except BaseException:
            for writer in self._writers:
                writer.abandon()
            raise
        self._entry.files = self._main.files | self._hidden.files
        self._log()
        return self._entry

    def replaced(self) -> set[str]:
        """Files of an earlier save, stock vLLM's included, that carry this rank's names."""
        names = (self._part_name, self._hidden_name)
        return {path.name for name in names for path in stale_parts(self._directory, name, set())}

    def _writer(self, name: Callable[[Any], str], room: int) -> PartWriter:
        if (
            self._max_size is not None
        ):  # a small part gets a small header; when it is full, another part
            room = min(room, max(_SMALL_HEADER, self._max_size // 64))
        return PartWriter(self._directory, name, self._max_size, room, self._save_id)

    def _source(self) -> Source:
        """What the configuration names now: after a reload, not what the engine was started from."""
        twin = Twin(self._config, load_device(self._config))
        load, model = self._config.load_config, self._config.model_config
        found = held.sharded_state(load, model)
        if found is not None or held.has_parts_alone(load, Path(str(model.model))):
            return SavedSource(twin, found)
        twin.vllm_config.load_config = held.own_format(load)
        return SourceReader(twin, self._initial)

    def _write(self, state: UnitState) -> None:
        self._entry.units[state.unit.name] = UnitEntry(
            state.layout, state.method, state.choices, state.processed
        )
        self._entry.kernels |= state.kernels
        if state.unit.processed and not state.is_whole_in_source:
            self._beyond_source = True
        for key, tensor in state.source.items():
            self._tensor(key, tensor, "source", Kind.PARAMETER, self._main)
        for leaf in state.overlay:
            if leaf.is_tensor:
                # In a source unit, a part may only hold what stock puts in place before processing.
                own = leaf.in_state_dict and state.layout == "runtime"
                writer = self._main if own else self._hidden
                if leaf.path in state.added | state.replaced:
                    self._free[leaf.path] = (leaf, writer, leaf.path in state.replaced)
                else:
                    self._tensor(leaf.path, leaf.value, "runtime", leaf.kind, writer, _owner(leaf))
            else:
                owner = leaf.owner if leaf.attribute else None
                self._value(leaf.path, leaf.value, "runtime", owner)
        for path, value in state.before.items():
            self._value(path, value, "source", None)

    def _write_free(self) -> None:
        """Write the tensors that no load creates: with strides, and whose memory they lie in."""
        found = [leaf for leaf, _, _ in self._free.values()]
        for leaf, view in sharing.arrange(found, self._leaves):
            _, writer, replace = self._free[leaf.path]
            name = f"{leaf.path}{manifest.AGAIN}" if leaf.path in self._entry.tensors else leaf.path
            entry = self._new_entry(name, leaf.path, leaf.value, "runtime", leaf.kind, writer)
            entry.owner, entry.replace = _owner(leaf), replace
            entry.stride = sharing.stride(leaf.value)
            if view is not None:
                entry.base, entry.offset = view.base, view.offset

    def _value(self, path: str, value: object, stage: str, owner: str | None) -> None:
        name = path if stage == "runtime" else f"{path}{manifest.AGAIN}"
        self._entry.values[name] = ValueEntry(plain.encode(value), stage, owner)

    def _tensor(
        self,
        path: str,
        tensor: torch.Tensor,
        stage: str,
        kind: Kind,
        writer: PartWriter,
        owner: str | None = None,
    ) -> None:
        """Write a tensor, or note that it is another one under a second path."""
        # Only a live tensor's address identifies it: a rebuilt one gives its memory back.
        same = (stage, *place(tensor)) if id(tensor) in self._live and tensor.numel() else None
        first = self._paths.get(same) if same else None
        if first is not None:
            self._entry.tensors[first].aliases.append(path)
            return
        # A source unit may hold a buffer twice: as it is before processing, and as it is now.
        name = f"{path}{manifest.AGAIN}" if path in self._entry.tensors else path
        if same:
            self._paths[same] = name
        self._new_entry(name, path, tensor, stage, kind, writer).owner = owner

    def _new_entry(
        self,
        name: str,
        path: str,
        tensor: torch.Tensor,
        stage: str,
        kind: Kind,
        writer: PartWriter,
    ) -> TensorEntry:
        if not holds(tensor.dtype):
            raise SaveError(f"{path} is {tensor.dtype}, which safetensors files can't hold.")
        key = self._stock_keys.key(path) if writer is self._main else path
        file, checksum = writer.add(key, tensor)
        shape, dtype = list(tensor.shape), dtype_name(tensor.dtype)
        entry = TensorEntry(file, key, str(kind), dtype, shape, stage, checksum)
        self._entry.tensors[name] = entry
        return entry

    def _stop_stock(self) -> None:
        """Keep stock vLLM from loading a checkpoint whose parts look whole to it and are not.

        Its loader raises `KeyError` with the name of a key that has no place.
        """
        layouts = {unit.layout for unit in self._entry.units.values()}
        if layouts == {"source"} and self._beyond_source:
            self._main.add(manifest.STOCK_STOP, torch.empty(0, dtype=torch.uint8))

    def _log(self) -> None:
        size = sum(file.size for file in self._entry.files.values())
        layouts = [unit.layout for unit in self._entry.units.values() if unit.method]
        logger.info(
            "Saved rank %d: %d tensors, %.2f GiB in %d files; %d modules in runtime layout, %d in "
            "source layout",
            self._rank,
            len(self._entry.tensors),
            size / 2**30,
            len(self._entry.files),
            layouts.count("runtime"),
            layouts.count("source"),
        )


def _part_name(pattern: str | None, several: bool) -> Callable[[Any], str]:
    def name(part: Any) -> str:
        return ShardedStateLoader._render_default_pattern(pattern, part=part)

    if several and name(0) == name(1):
        raise OptionError(
            f"File pattern {pattern!r} lacks {{part}}, so every part would have one name.\n"
            "Add {part} to it, or save without a maximal size."
        )
    return name


def _hidden_name(rank: int, part_name: Callable[[Any], str]) -> Callable[[Any], str]:
    """Names for hidden state that upstream's pattern does not match, so that stock never reads it."""

    def name(part: Any) -> str:
        return f"hidden-state-rank-{rank}-part-{part}.safetensors"

    if fnmatch.fnmatch(name(0), part_name("*")):
        raise OptionError(
            f"The file pattern gives {part_name('*')!r}, which also matches {name('*')!r}, where "
            "hidden state is kept.\nUse a pattern with a name of its own."
        )
    return name


def _owner(leaf: Leaf) -> str | None:
    """The module that the plain attribute `leaf` belongs to; None for what is no attribute of one."""
    return leaf.owner if leaf.kind is Kind.ATTRIBUTE and leaf.attribute else None
