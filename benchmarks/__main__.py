"""Measure side by side: `python -m benchmarks [--section read …] [--rounds 5]`.

Makes its inputs under `.cache/bench` (6 GB), prints tables, and writes `results.json` and
`results.png` there. A section that is not asked for keeps its results of an earlier run.
"""

import argparse
import importlib.util
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

from . import plot, report
from .measure import ROOT
from .sections import SECTIONS, Setting


def main() -> int:
    """Measure, and print what was found."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--section", nargs="*", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=[], help="contenders that take part")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "bench")
    parser.add_argument(
        "--large", default="llama", help="the large input; llama-8 is 8 times narrower"
    )
    parser.add_argument("--counts", type=int, nargs="+", default=(10_000, 50_000))
    arguments = parser.parse_args()
    cache = arguments.cache.resolve()
    cache.mkdir(parents=True, exist_ok=True)
    setting = Setting(
        cache,
        arguments.rounds,
        arguments.large,
        tuple(arguments.counts),
        frozenset(arguments.only),
    )
    results = cache / "results.json"
    found: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {}
    for name in arguments.section:
        began = time.monotonic()
        records = SECTIONS[name](setting)
        print(*report.tables(records), sep="\n", flush=True)
        found[name] = {"machine": machine(), "records": records}
        results.write_text(json.dumps(found, indent=1))
        print(f"\n({name}: {time.monotonic() - began:.0f} s)", file=sys.stderr, flush=True)
    records = [record for name in SECTIONS for record in found.get(name, {}).get("records", ())]
    print(*report.goal_lines(records), sep="\n")
    if importlib.util.find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed", file=sys.stderr)
    else:
        plot.draw(records, cache / "results.png")
    print(f"\n{results}")
    return 0


def machine() -> dict[str, Any]:
    """On what it was measured."""
    import os

    import torch

    model = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpu": model[0] if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


if __name__ == "__main__":
    sys.exit(main())
