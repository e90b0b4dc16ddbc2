"""What ``scripts/bench.py`` measures, one thing a file."""
