"""The path at which LMDeploy's scripts look for the client."""

from lmdeploy.serve.client import APIClient, get_model_list

__all__ = ["APIClient", "get_model_list"]
