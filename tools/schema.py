"""Write `docs/sharded_state.schema.json`, the JSON schema of the manifest: `python tools/schema.py`.

It is made from the records in `vllm_sharded_state/checkpoint`; a test fails where the two differ.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from vllm_sharded_state.checkpoint.schema import schema  # noqa: E402

PATH = ROOT / "docs" / "sharded_state.schema.json"


def main() -> None:
    """Write the file."""
    PATH.write_bytes(schema())


if __name__ == "__main__":
    main()
