"""Compute with torch, on the CPU or a CUDA card. Importing this, or `plan`, loads no torch."""
