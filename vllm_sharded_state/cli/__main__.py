"""`python -m vllm_sharded_state.cli`: the same as `vllm-sharded-state`."""

import sys

from vllm_sharded_state.cli import main

if __name__ == "__main__":
    sys.exit(main())
