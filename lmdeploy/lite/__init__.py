"""Compresses a model: calibration, scales, rounding, export, one layer at a time. Needs torch."""
