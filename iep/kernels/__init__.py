"""Layers that Triton kernels, deferred weight gradients or CUDA graphs can compute, and the ways to execute a plan."""
