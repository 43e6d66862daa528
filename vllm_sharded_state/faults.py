"""What can be wrong between the tensors of a checkpoint and their places in a model."""

from dataclasses import dataclass, field

from .errors import IncompleteError, TensorMismatchError, UnexpectedTensorError, listed


@dataclass
class Faults:
    """Faults found while tensors were matched with their places, by kind."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def refuse(self, directory: object, strict: bool) -> None:
        """Raise for the first kind of fault there is; missing tensors only when `strict`."""
        if self.wrong:
            raise TensorMismatchError(
                f"Tensors in {directory} have another form than the model:\n{listed(self.wrong)}\n"
                "The checkpoint belongs to another model or configuration; save again from this one."
            )
        if self.unexpected:
            raise UnexpectedTensorError(
                f"Tensors in {directory} have no place in the model:\n{listed(self.unexpected)}\n"
                "The checkpoint belongs to another model or configuration; save again from this one."
            )
        if self.missing and strict:
            raise IncompleteError(
                f"The model reads tensors that {directory} does not hold:\n{listed(self.missing)}\n"
                "Save the model again. To start all the same, with zeros (scales: 1.0) in their "
                "place, set strict to false in model_loader_extra_config."
            )
