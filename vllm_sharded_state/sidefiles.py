"""Copy what a model directory holds beside its weights: config, tokenizer, templates, remote code."""

import fnmatch
import shutil
from pathlib import Path

#: Files that hold weights, or speak of files that do.
WEIGHTS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.bin.index.json",
    "*.pt",
    "*.pth",
    "*.gguf",
    "*.onnx",
    "*.h5",
    "*.msgpack",
    "*.tensors",
    "sharded_state.json",
)
#: Folders of a hub's own book-keeping, or of weights in another format.
SKIPPED_FOLDERS = frozenset({".git", ".cache", "original", "onnx", "__pycache__"})


def copy(source: Path, target: Path) -> list[str]:
    """Copy every file of `source` that holds no weights into `target`; links are resolved.

    Returns the copied names. Does nothing where both are one directory.
    """
    if source.resolve() == target.resolve():
        return []
    copied = []
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        if SKIPPED_FOLDERS & set(relative.parts) or not path.is_file():
            continue
        if any(fnmatch.fnmatch(path.name, pattern) for pattern in WEIGHTS):
            continue
        destination = target / relative
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, destination)
        copied.append(str(relative))
    return copied
