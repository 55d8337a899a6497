"""Benchmarks: python -m tools.bench (see tools/bench/harness.py)."""
