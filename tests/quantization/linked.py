"""Methods of layers that know one another: what one keeps lies in, or comes from, another."""

from typing import Any

import torch
from vllm.config import get_current_vllm_config

from tests.quantization.base import Plain, frozen, method, packed, unpacked, whole


class _Linked(Plain):
    """Layers of one model that know the first of them, by way of the model's own config."""

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)
        context = get_current_vllm_config().compilation_config.static_forward_context
        self.first = context.setdefault("vss_first", layer)


@method("others_weight")
class OthersWeight(_Linked):
    """Each layer's factor comes from the first one's weight, as a float."""

    def process(self, layer: Any) -> None:
        layer.factor = 1.0 + float(self.first.weight.data.float().abs().max())

    def matrix(self, layer: Any) -> torch.Tensor:
        return whole(layer).t() * layer.factor


@method("reads_other")
class ReadsOther(_Linked):
    """The kernel of every layer reads the first one's gain when it runs."""

    def process(self, layer: Any) -> None:
        layer.weight = frozen(layer.weight.data.t().contiguous())

    def matrix(self, layer: Any) -> torch.Tensor:
        return layer.weight.data.float() * float(self.first.gain.data[0])


@method("scales_other")
class ScalesOther(_Linked):
    """A layer folds a factor into the first one; with the real weights the factor is 1.

    The first keeps a number where only processing can put it, so that it is saved as source; the
    others can be saved as they run, and so are processed with placeholders while they are loaded.
    """

    def process(self, layer: Any) -> None:
        if layer is self.first:
            layer.kept = (float(whole(layer).abs().max()),)
        elif float(whole(layer).abs().mean()) > 0.2:
            self.first.weight.data.mul_(0.5)

    def matrix(self, layer: Any) -> torch.Tensor:
        return whole(layer).t()


@method("attribute_of_other")
class AttributeOfOther(_Linked):
    """The packed weight of each layer is an attribute of the first one."""

    def process(self, layer: Any) -> None:
        ints, layer.alpha = packed(layer)
        setattr(self.first, self.prefix.replace(".", "_"), ints)
        layer.weight = frozen(torch.empty(0))

    def matrix(self, layer: Any) -> torch.Tensor:
        return unpacked(getattr(self.first, self.prefix.replace(".", "_")), layer.alpha)
