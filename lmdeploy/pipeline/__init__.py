"""The offline API: `pipeline(model)` gives a `Pipeline` that answers prompts in this process."""

from lmdeploy.messages import Response
from lmdeploy.pipeline.api import Pipeline
from lmdeploy.pipeline.load import load, pipeline
from lmdeploy.pipeline.session import Session

__all__ = ["Pipeline", "Response", "Session", "load", "pipeline"]
