"""What was measured, as tables; and whether the figures that this project has to reach are reached.

Ratios are of speeds, and paired: each round's time is set against the limit's time of the same round,
and the median of those is given, so that what else the machine does falls on both.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Record = dict[str, Any]

LIMITS = {"read": "preadv", "write": "plain"}
MIB = 1 << 20


def ratio(record: Record, other: Record) -> float:
    """How many times as fast as `other` a record is: the median over rounds."""
    return statistics.median(b / a for a, b in zip(record["all"], other["all"], strict=True))


def title(record: Record) -> str:
    """What distinguishes the runs of a record from others of its section."""
    parts = [record["section"]]
    if "tensors" in record:
        parts.append(f"{record['tensors']:,} tensors")
    if "way" in record:
        parts.append({"tensors": "weights in tensors", "packed": "packed by oneDNN"}[record["way"]])
    if "what" in record:
        parts.append(record["what"])
    if "cold" in record:
        parts.append("cold" if record["cold"] else "warm")
    if "state" in record:
        parts.append(f"into {record['state']} memory")
    if "sync" in record:
        parts.append("with fsync" if record["sync"] else "without fsync")
    return ", ".join(parts)


def groups(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Records that were measured beside each other, by title."""
    found: dict[str, list[Record]] = {}
    for record in records:
        if "profile" not in record:
            found.setdefault(title(record), []).append(record)
    return found


def _named(group: list[Record], name: str) -> Record | None:
    return next((r for r in group if r["name"] == name and "seconds" in r), None)


def tables(records: Iterable[Record]) -> Iterator[str]:
    """Lines: a table for each group, then the profiles."""
    records = list(records)
    for name, group in groups(records).items():
        yield from ("", f"## {name}", "")
        yield from _table(group)
    for record in records:
        if "profile" in record:
            yield from ("", f"## where the time goes: {title(record)}, {record['name']}", "")
            yield from _lines(
                [["own seconds", "calls", "function"]]
                + [[f"{own:.3f}", str(calls), where] for own, calls, where in record["profile"]]
            )


def _table(group: list[Record]) -> Iterator[str]:
    first = group[0]
    limit = next((r for n in LIMITS.values() if (r := _named(group, n))), None)
    stock = _named(group, "stock")
    head = ["", "s", "best s"]
    head += ["µs a tensor"] if "tensors" in first else ["GB/s"]
    head += ["of the limit"] if limit else []
    head += ["times stock"] if stock else []
    head += ["CPU s", "peak MiB", "disk B/B", "calls B/B"]
    rows = [head]
    for record in group:
        row = [record["name"]]
        if "error" in record:
            rows.append([*row, record["error"].splitlines()[0]])
            continue
        seconds = record["seconds"]
        row += [f"{seconds:.3f}", f"{min(record['all']):.3f}"]
        if "tensors" in record:
            row.append(f"{seconds / record['tensors'] * 1e6:.1f}")
        else:
            row.append(f"{record['bytes'] / seconds / 1e9:.2f}")
        row += [f"{ratio(record, limit):.2f}"] if limit else []
        row += [f"{ratio(record, stock):.2f}"] if stock else []
        moved = (
            record["wchar"] if "sync" in record or record.get("what") == "save" else record["rchar"]
        )
        row += [
            f"{record['user'] + record['system']:.2f}",
            f"{record['peak'] / MIB:.0f}",
            f"{record['read_bytes'] / record['bytes']:.2f}",
            f"{moved / record['bytes']:.2f}",
        ]
        rows.append(row)
    yield from _lines(rows)


def _lines(rows: list[list[str]]) -> Iterator[str]:
    """A table in Markdown. A row may end early: its last cell is a remark, and sets no width."""
    count = len(rows[0])
    widths = [max(len(r[i]) for r in rows if len(r) == count) for i in range(count)]
    widths[0] = max(len(r[0]) for r in rows)
    for number, row in enumerate(rows):
        cells = [cell.ljust(w) for cell, w in zip(row, widths, strict=False)]
        cells += [""] * (count - len(row))
        yield "| " + " | ".join(cells) + " |"
        if number == 0:
            yield "|" + "|".join("-" * (width + 2) for width in widths) + "|"


def goals(records: Iterable[Record]) -> Iterator[tuple[str, float, float, str, bool]]:
    """What has to be reached: what, the figure, the same of the best rounds, the bound, whether it is.

    The best rounds are those in which the machine did least else; the median of all decides.
    """
    records = list(records)
    for name, group in groups(records).items():
        if group[0].get("cold"):
            continue
        for goal, contender, other, bound in (
            ("read, verify full, of plain preadv", "ours-full", "preadv", 0.85),
            ("read, verify off, of plain preadv", "ours-off", "preadv", 0.95),
            ("read, verify full, times stock", "ours-full", "stock", 2.0),
            ("read, verify full, times stock with one thread", "ours-full", "stock-1-thread", 2.0),
            ("write, of a plain write", "ours", "plain", 0.85),
        ):
            mine, theirs = _named(group, contender), _named(group, other)
            if mine and theirs and "tensors" not in mine and "way" not in mine:
                found = ratio(mine, theirs)
                best = min(theirs["all"]) / min(mine["all"])
                yield f"{goal} ({name})", found, best, f">= {bound}", found >= bound
    yield from _per_tensor(records)


def _per_tensor(records: list[Record]) -> Iterator[tuple[str, float, float, str, bool]]:
    """Microseconds a tensor at the larger number, and how they grew from the smaller one."""
    kinds: dict[tuple[str, str, Any], list[Record]] = {}
    for record in records:
        if "tensors" in record and "seconds" in record and record["name"].startswith("ours"):
            kinds.setdefault((record["name"], record["section"], record.get("what")), []).append(
                record
            )
    for (name, section, task), group in kinds.items():
        few, most = min(group, key=_tensors), max(group, key=_tensors)
        label = " ".join(filter(None, (section, task, name)))
        each, best = _microseconds(most)
        yield f"µs a tensor at {most['tensors']:,}: {label}", each, best, "< 30", each < 30
        if few is most:
            continue
        growth, least = (a / b for a, b in zip((each, best), _microseconds(few), strict=True))
        what = f"growth of that from {few['tensors']:,}: {label}"
        yield what, growth, least, "<= 1.25", growth <= 1.25


def _microseconds(record: Record) -> tuple[float, float]:
    """Of a tensor: in the median round, and in the best one."""
    each = 1e6 / record["tensors"]
    return record["seconds"] * each, min(record["all"]) * each


_tensors: Callable[[Record], int] = lambda record: record["tensors"]  # noqa: E731


def goal_lines(records: Iterable[Record]) -> Iterator[str]:
    """The goals as a table."""
    rows = [["goal", "found", "best rounds", "asked", ""]]
    rows += [
        [what, f"{found:.2f}", f"{best:.2f}", bound, "reached" if reached else "NOT reached"]
        for what, found, best, bound, reached in goals(records)
    ]
    if len(rows) > 1:
        yield from ("", "## what has to be reached", "")
        yield from _lines(rows)
