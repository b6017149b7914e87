"""Fused GPU kernels, one folder per operation: a torch reference and a Triton kernel with the same signature.

The package of an operation holds the function to call; it picks the kernel (see :mod:`kvslim.kernels.dispatch`).
"""
