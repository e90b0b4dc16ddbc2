"""Triton kernels of the attention: tensors and compile-time choices in, tensors out."""
