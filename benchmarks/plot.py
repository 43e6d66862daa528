"""The figures as a picture: one panel for each comparison, a bar for each contender."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .report import LIMITS, groups

OURS, LIMIT, OTHERS = "tab:blue", "lightgray", "tab:orange"


def _color(name: str) -> str:
    if name in LIMITS.values():
        return LIMIT
    return OURS if name.startswith("ours") else OTHERS


def draw(records: Iterable[dict[str, Any]], path: Path) -> None:
    """Write a picture to `path` (PNG or SVG, by its suffix). Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = {
        name: [record for record in group if "seconds" in record]
        for name, group in groups(records).items()
    }
    panels = {name: group for name, group in panels.items() if group}
    rows = -(-len(panels) // 2)
    figure, axes = pyplot.subplots(rows, 2, figsize=(14, 3.2 * rows), squeeze=False)
    for axis, (name, group) in zip(axes.flat, panels.items(), strict=False):
        per_tensor = "tensors" in group[0]
        values = [
            record["seconds"] / record["tensors"] * 1e6
            if per_tensor
            else record["bytes"] / record["seconds"] / 1e9
            for record in group
        ]
        colors = [_color(record["name"]) for record in group]
        bars = axis.barh([record["name"] for record in group], values, color=colors)
        axis.bar_label(bars, fmt="%.2f", padding=3)
        axis.invert_yaxis()
        axis.margins(x=0.15)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("µs a tensor (less is better)" if per_tensor else "GB/s (more is better)")
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
