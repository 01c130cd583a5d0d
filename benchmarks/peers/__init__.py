"""Engines beside ours: one worker for each, that loads a model once and measures what it is told to."""
