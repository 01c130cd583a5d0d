"""Our quantiser as a process of its own, with the tokens that the others get.  usage: ours_worker.py JOB.json

A job names `model` and `out` (directories), `samples` (a JSON file: lists of token ids), `format`, and the
`recipe`: its fields, those of its scheme under `scheme`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from lmdeploy.errors import LMDeployError
from lmdeploy.lite.job import Calibration, Output, quantise_model
from lmdeploy.lite.recipe import Recipe
from lmdeploy.quant.scheme import WeightScheme


def quantise(job: dict[str, Any]) -> None:
    fields = dict(job["recipe"])
    recipe = Recipe(scheme=WeightScheme(**fields.pop("scheme")), **fields)
    calibration = Calibration(json.loads(Path(job["samples"]).read_text()), {"source": "benchmark"})
    output = Output(Path(job["out"]), job["format"], force=True)
    quantise_model(Path(job["model"]), recipe, calibration, output, lambda *_: None)


if __name__ == "__main__":
    try:
        quantise(json.loads(Path(sys.argv[1]).read_text()))
    except LMDeployError as error:
        sys.exit(str(error))
