"""What ``scripts/benchmarks/bench.py`` measures, one thing a file."""
