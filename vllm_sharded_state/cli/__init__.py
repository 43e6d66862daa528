"""The command `vllm-sharded-state`: look into saved directories, and check them, without an engine.

What a command needs is imported when it runs, so that `--help` answers at once.
"""

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_sharded_state import __version__
from vllm_sharded_state.errors import ShardedStateError

#: Exit codes.
FINE, FOUND, USAGE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0 fine, 1 refused or damaged, 2 wrong usage."""
    parser = _parser()
    given = parser.parse_args(arguments)
    command = importlib.import_module(f".{given.command}", __name__)
    try:
        found, code = command.run(given)
        if given.json:
            print(json.dumps(found, indent=1))
        else:
            command.show(found)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ShardedStateError, OSError) as error:
        if given.debug:
            raise
        if given.json:
            print(json.dumps({"error": type(error).__name__, "message": str(error)}))
        else:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return FOUND
    return int(code)


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("directory", type=Path, help="a directory that save_sharded_state wrote")
    common.add_argument("--json", action="store_true", help="print the result as JSON")
    common.add_argument("--debug", action="store_true", help="show where an error was raised")
    parser = argparse.ArgumentParser(
        prog="vllm-sharded-state",
        description="Look into directories that vLLM's save_sharded_state wrote, and check them.",
        epilog="Exit codes: 0 fine; 1 refused, damaged or different; 2 wrong usage.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    inspect = commands.add_parser(
        "inspect",
        parents=[common],
        help="what a directory holds and where it may be loaded",
        description="Show what a directory holds, its KV scales, and what it may be loaded into.",
    )
    inspect.add_argument(
        "--tensors", metavar="GLOB", help="list the tensors whose names match, '*' for all"
    )
    verify = commands.add_parser(
        "verify",
        parents=[common],
        help="compare every byte with its checksum",
        description="Read every part and compare it with the manifest's checksums; with --against "
        "compare two saves tensor by tensor.",
    )
    verify.add_argument(
        "--against", metavar="DIR", type=Path, help="another saved directory to compare with"
    )
    return parser
