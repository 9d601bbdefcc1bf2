"""Triton kernels. Installed as `vit_prune.kernels`; imports nothing else of vit_prune."""
