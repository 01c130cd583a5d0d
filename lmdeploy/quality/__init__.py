"""Measures what a model answers beside the original: divergence, perplexity, behaviours, and the report."""
