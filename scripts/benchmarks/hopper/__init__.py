"""Kernels of ``flash_fixed`` for Hopper that nothing calls but :mod:`benchmarks.candidates`."""
