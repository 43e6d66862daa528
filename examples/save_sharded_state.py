"""Save each rank's state of a model, to start from it later with `load_format="sharded_state"`.

    python examples/save_sharded_state.py --model /path/to/model --tensor-parallel-size 2 \
        -o /path/to/saved

Takes vLLM's engine arguments; use those that the later engine will run with. The flags are those of
vLLM's own `examples/features/sharded_state/save_sharded_state_offline.py`, and `--layout`. The
output directory is complete: config and tokenizer files are written to it too.
"""

import os
from pathlib import Path

from vllm import LLM, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

GIB = 1024**3


def parser() -> FlexibleArgumentParser:
    """Return the parser: vLLM's engine arguments and those of the save."""
    arguments = FlexibleArgumentParser(description="Save each rank's state of a model.")
    EngineArgs.add_cli_args(arguments)
    arguments.add_argument("-o", "--output", required=True, type=Path, help="directory to save to")
    arguments.add_argument(
        "--file-pattern", help="names of the parts, with {rank} and {part} (default: vLLM's own)"
    )
    arguments.add_argument(
        "--max-file-size", type=int, default=5 * GIB, help="largest size of a part, in bytes"
    )
    arguments.add_argument(
        "--layout",
        choices=("auto", "runtime", "source"),
        help="auto: as the kernels read it where that is whole, else as the checkpoint gives it"
        " (default: VSS_LAYOUT, or auto)",
    )
    return arguments


def main() -> None:
    """Start an engine by the command line and save its state."""
    args = parser().parse_args()
    if args.layout:
        # Read by the processes that hold the model, which start with the engine.
        os.environ["VSS_LAYOUT"] = args.layout
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(args))
    llm.llm_engine.engine_core.save_sharded_state(
        path=str(args.output), pattern=args.file_pattern, max_size=args.max_file_size
    )
    print(f"Saved {args.model} to {args.output}")


if __name__ == "__main__":
    main()
