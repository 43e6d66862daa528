"""Put a manifest where a load looks for it, without a save."""

from pathlib import Path

from vllm_sharded_state.checkpoint.manifest import FILE_NAME, Manifest, encode


def write(directory: Path, manifest: Manifest) -> None:
    """The bytes that a save would publish. Raises `ManifestError` where `manifest` is not sound."""
    data = encode(manifest)
    (directory / FILE_NAME).write_bytes(data)
