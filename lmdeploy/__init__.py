"""LMDeploy: compress, run and serve large language models."""
