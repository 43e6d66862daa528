"""The errors of this package: one type for one cause, each saying what is wrong and what to do.

They derive from `ValueError` because that is what vLLM's own sharded-state loader raises, so callers
that catch its errors keep working.
"""

from collections.abc import Iterable

#: How many names an error lists before it counts the rest.
LISTED = 12
#: How many characters of a name it shows.
SHOWN = 300


def listed(names: Iterable[str]) -> str:
    """Join names sorted, one line each, the first `LISTED` in full and the rest as a number."""
    ordered = sorted(names)
    lines = [f"  {shown(name)}" for name in ordered[:LISTED]]
    if len(ordered) > LISTED:
        lines.append(f"  ... and {len(ordered) - LISTED} more")
    return "\n".join(lines)


def shown(name: str) -> str:
    """`name` on one line and of bounded length, for an error: it may come from a file that lies."""
    start = name[:SHOWN]
    text = start if start.isprintable() else ascii(start)[1:-1]
    return text if len(name) <= SHOWN else f"{text}... ({len(name)} characters)"


class ShardedStateError(ValueError):
    """Base of every error this package raises on purpose.

    changed: in a reload, whether the model holds other weights now than before nevertheless.
    """

    changed = False


class PatchError(ShardedStateError):
    """A patch to vLLM could not be applied, or did not take."""


class OptionError(ShardedStateError):
    """An option, environment variable or extra config key has a value that means nothing here."""


class NotRepresentableError(ShardedStateError):
    """A module's state can be held in neither layout, or not in the one that was asked for."""


class StaleSourceError(ShardedStateError):
    """The source checkpoint, read again, no longer gives the weights that the live module uses."""


class NoSourceError(ShardedStateError):
    """Weights were packed away, and there is no checkpoint to read them from again."""


class SaveError(ShardedStateError):
    """A sharded state could not be written."""


class ManifestError(ShardedStateError):
    """`sharded_state.json` is damaged, or of a format this version cannot read."""


class FetchError(ShardedStateError):
    """A checkpoint on a hub or in object storage can't be reached."""


class MismatchError(ShardedStateError):
    """The checkpoint belongs to another model, layout of ranks, or platform."""


class IncompleteError(ShardedStateError):
    """A tensor the model reads is not in the checkpoint, or a file or part is missing."""


class UnexpectedTensorError(ShardedStateError):
    """A tensor in the checkpoint has no place in the model."""


class TensorMismatchError(ShardedStateError):
    """A tensor's shape or dtype differs from its place in the model."""


class RestoreError(ShardedStateError):
    """A restored module is not what was saved: part of its state could not be put back."""


class ReloadError(ShardedStateError):
    """New weights were not taken into the running model; the subclasses tell why."""


class ReloadArgumentError(ReloadError, TypeError):
    """`reload_weights` was called with an argument that it does not have, or can't follow here."""


class ReloadUnsupportedError(ReloadError):
    """This engine, or this model, can't take new weights while it runs."""


class ReloadSourceError(ReloadError):
    """The new weights could not be read: their iterator failed, their memory was used again, or their
    path leads nowhere.
    """


class ReloadIncompleteError(ReloadError):
    """A layer was sent in part; the rest of it can't be kept beside new weights."""


class ReloadUnexpectedError(ReloadError):
    """A tensor was sent that has no place in the model, or was sent twice."""


class ReloadMismatchError(ReloadError):
    """A tensor was sent in a shape or dtype that its place in the model can't take."""


class ReloadScaleError(ReloadError):
    """A scale was sent that is not finite, or not positive."""


class ReloadInPlaceError(ReloadError):
    """A layer's new state can't be put where the old one lies."""


class ReloadRoomError(ReloadError):
    """Host memory does not hold the copy of the old weights that a failed reload would need."""


class ReloadBusyError(ReloadError):
    """Another reload of the same model is under way, or the engine can't stop its steps for one."""


class ReloadAsleepError(ReloadError):
    """The engine sleeps: there is no memory to put new weights into."""


class ReloadCacheError(ReloadError):
    """KV blocks that were computed with the old weights can't be cleared."""


class ReloadPeerError(ReloadError):
    """Another rank could not take the new weights, so this one does not either."""


class ReloadEndedError(ReloadError):
    """An update is continued, or finished, that has failed and was taken back."""


class ReloadBrokenError(ReloadError):
    """The old weights could not be put back; the engine has to be started anew."""

    changed = True
