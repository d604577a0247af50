"""Triton kernels of the CUDA path. Importing a module of this package needs Triton."""
