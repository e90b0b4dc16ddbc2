"""Kernels of ``flash_fixed`` for Hopper in which groups of warps have roles.

One copies tiles, two compute, each with 64 rows of a block. ``flashpoint.numerics.compile_time.runs_warp_groups`` says
what they compute.
"""
