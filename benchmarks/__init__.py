"""Speed, measured side by side: `python -m benchmarks` (see docs/speed.md)."""
