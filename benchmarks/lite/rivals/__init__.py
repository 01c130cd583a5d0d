"""Quantisers beside ours: one worker for each, run in its own environment."""
