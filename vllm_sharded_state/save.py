"""Model to directory: the state of one rank, unit by unit, and the manifest when all ranks are done."""

import fnmatch
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.logger import init_logger
from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

from . import identity, options, publish
from .checkpoint import manifest
from .checkpoint.dtypes import dtype_name, holds
from .checkpoint.manifest import RankEntry, TensorEntry, UnitEntry, ValueEntry
from .checkpoint.writing import PartWriter, header_room, stale_parts
from .errors import OptionError, SaveError, ShardedStateError
from .mirrors import refuse_disagreement
from .remote import FORMATS
from .saved_source import SavedSource
from .state import construction, kernels, plain, units
from .state.compare import place
from .state.layout import Chooser
from .state.source import SourceReader
from .state.twin import Twin
from .state.unit_state import Source, UnitState
from .state.walk import Kind
from .stock_keys import StockKeys

logger = init_logger("vllm.sharded_state.save")


def save_model(
    model: nn.Module, path: str, pattern: str | None = None, max_size: int | None = None
) -> None:
    """Save this rank's state of `model` to the directory `path`; every rank calls it.

    `pattern` names the part files as upstream's loader does, `max_size` (bytes) starts another part.
    The manifest is published by rank 0 once every rank has written its own.

    Raises `ShardedStateError`: `NotRepresentableError`, `StaleSourceError` or `NoSourceError` name the
    module that can't be saved exactly; `SaveError` tells what went wrong with the directory.
    """
    model = model.unwrap() if hasattr(model, "unwrap") else model
    built = construction.recall(model)
    if built is None:
        raise SaveError(
            "The model was built before vllm-sharded-state was active in this process, so what it "
            "was loaded from is not known.\nStart the engine with the plugin enabled, and save again."
        )
    directory = Path(path)
    entry: RankEntry | None = None
    saver: _RankSaver | None = None
    failure: BaseException | None = None
    try:
        directory.mkdir(parents=True, exist_ok=True)
        saver = _RankSaver(model, built, directory, pattern, max_size)
        entry = saver.save()
    except ShardedStateError as error:
        failure = error
    except OSError as error:
        failure = SaveError(f"{directory} can't be written: {error}")
        failure.__cause__ = error
    try:
        entries = publish.exchange(entry, failure)
    except BaseException:
        if saver is not None:
            saver.abandon()
        raise
    assert saver is not None
    publish.replace(directory, built.vllm_config, entries, saver.commit)


class _RankSaver:
    """Saves one rank. Tensors go to disk unit by unit, as soon as their layout is known."""

    def __init__(
        self,
        model: nn.Module,
        built: construction.Construction,
        directory: Path,
        pattern: str | None,
        max_size: int | None,
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
        self._paths: dict[tuple[Any, ...], str] = {}
        self._beyond_source = False
        self._writers: list[PartWriter] = []

    def save(self) -> RankEntry:
        """Write every unit; returns the rank's entry of the manifest."""
        identity.refuse_ambiguous_ranks(self._config)
        states = list(units.all_leaves(self._model))
        every_leaf = {path: leaf for _, leaves in states for path, leaf in leaves.items()}
        refuse_disagreement(every_leaf)
        self._live = {id(leaf.value) for leaf in every_leaf.values() if leaf.is_tensor}
        self._stock_keys = StockKeys(self._model, every_leaf.values())
        tensors = [path for path, leaf in every_leaf.items() if leaf.is_tensor]
        room = header_room([*tensors, *self._keys, manifest.STOCK_STOP])
        self._main = PartWriter(self._directory, self._part_name, self._max_size, room)
        self._hidden = PartWriter(self._directory, self._hidden_name, self._max_size, room)
        self._writers = [self._main, self._hidden]
        device = _device(self._config)
        self._entry.kernel_environment = kernels.environment(device)
        chooser = Chooser(self._config, device, self._initial, self._wanted, self._source)
        try:
            for unit, leaves in states:
                self._write(chooser.choose(unit, leaves))
            self._stop_stock()
            for writer in self._writers:
                writer.close()
        except BaseException:
            self.abandon()
            raise
        self._entry.files = self._main.files | self._hidden.files
        self._log()
        return self._entry

    def abandon(self) -> None:
        """Remove what was written; an earlier checkpoint in the directory stays as it is."""
        for writer in self._writers:
            writer.abandon()

    def commit(self) -> None:
        """Give the parts their names, and remove those that an earlier save left under such names."""
        for writer in self._writers:
            writer.commit()
        for name in (self._part_name, self._hidden_name):
            for path in stale_parts(self._directory, name, set(self._entry.files)):
                path.unlink()

    def _source(self) -> Source:
        twin = Twin(self._config, _device(self._config))
        if self._config.load_config.load_format in FORMATS:
            return SavedSource(twin)
        return SourceReader(twin, self._initial)

    def _write(self, state: UnitState) -> None:
        self._entry.units[state.unit.name] = UnitEntry(state.layout, state.method)
        self._entry.kernels |= state.kernels
        if state.unit.processed and not state.is_whole_in_source:
            self._beyond_source = True
        for key, tensor in state.source.items():
            self._tensor(key, tensor, "source", Kind.PARAMETER, self._main)
        for leaf in state.overlay:
            if leaf.is_tensor:
                # In a source unit, a part may only hold what stock puts in place before processing.
                own = leaf.in_state_dict and state.layout == "runtime"
                owner = leaf.owner if leaf.kind is Kind.ATTRIBUTE and leaf.attribute else None
                writer = self._main if own else self._hidden
                replace = leaf.path in state.replaced
                self._tensor(leaf.path, leaf.value, "runtime", leaf.kind, writer, owner, replace)
            else:
                owner = leaf.owner if leaf.attribute else None
                self._value(leaf.path, leaf.value, "runtime", owner)
        for path, value in state.before.items():
            self._value(path, value, "source", None)

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
        replace: bool = False,
    ) -> None:
        """Write a tensor, or note that it is another one under a second path."""
        if not holds(tensor.dtype):
            raise SaveError(f"{path} is {tensor.dtype}, which safetensors files can't hold.")
        # Only a live tensor's address identifies it: a rebuilt one gives its memory back.
        same = (stage, *place(tensor)) if id(tensor) in self._live and tensor.numel() else None
        first = self._paths.get(same) if same and not replace else None
        if first is not None:
            self._entry.tensors[first].aliases.append(path)
            return
        # A source unit may hold a buffer twice: as it is before processing, and as it is now.
        name = f"{path}{manifest.AGAIN}" if path in self._entry.tensors else path
        if same:
            self._paths.setdefault(same, name)
        key = self._stock_keys.key(path) if writer is self._main else path
        file, checksum = writer.add(key, tensor)
        self._entry.tensors[name] = TensorEntry(
            file,
            key,
            str(kind),
            dtype_name(tensor.dtype),
            list(tensor.shape),
            stage,
            checksum,
            owner=owner,
            replace=replace,
        )

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


def _device(config: Any) -> torch.device:
    return torch.device(config.load_config.device or config.device_config.device)
