"""Where a part lies until its save has ended."""

from pathlib import Path


def locate(directory: Path, name: str, save_id: str) -> Path:
    """The file to open for the part `name`: the staged one if it is there, else the one of that name."""
    staged = directory / f".{name}.{save_id}.tmp"
    return staged if staged.exists() else directory / name
