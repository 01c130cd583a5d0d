"""`pipeline()`: from the name of a model to a `Pipeline` in this process."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lmdeploy.config import ChatTemplateConfig, EngineConfig
from lmdeploy.errors import ConfigError
from lmdeploy.logging import get_logger, set_up
from lmdeploy.pipeline.api import Pipeline
from lmdeploy.runtime.build import build_engine
from lmdeploy.runtime.generate import Frontend, load_frontend
from lmdeploy.runtime.resolve import RuntimeConfig, plan_table, resolve
from lmdeploy.speculative import SpeculativeConfig, speculative_options


def pipeline(
    model_path: str,
    backend_config: EngineConfig | None = None,
    chat_template_config: ChatTemplateConfig | str | Path | None = None,
    log_level: str = "WARNING",
    max_log_len: int | None = None,
    trust_remote_code: bool = False,
    speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None,
    allowed_media_domains: None = None,
    **unknown: Any,
) -> Pipeline:
    """Load a model (directory, GGUF file or hub id) into this process.

    backend_config: TurbomindEngineConfig or PytorchEngineConfig takes that engine, None the better fit. Which
    one and why is logged at WARNING, the memory plan at INFO, what limits it unexpectedly at WARNING.
    speculative_config: a SpeculativeConfig or a dictionary of its fields turns speculative decoding on.
    `trust_remote_code` may be given and changes nothing: code from a model is never run. Raises ConfigError,
    ModelError and CapacityError, each one line.
    """
    set_up(log_level)
    _refuse(unknown, allowed_media_domains)
    if backend_config is not None and not isinstance(backend_config, EngineConfig):
        kind = type(backend_config).__name__
        raise ConfigError(
            f"backend_config must be a TurbomindEngineConfig or a PytorchEngineConfig, not {kind}",
            param="backend_config",
        )
    speculative = speculative_options(speculative_config)
    config = resolve(model_path, backend_config, speculative=speculative)
    get_logger().info("%s", plan_table(config))
    if backend_config is None or type(backend_config) is EngineConfig:  # nobody has said which
        get_logger().warning("engine: %s", config.engine)
    for caution in config.cautions:
        get_logger().warning("%s", caution)
    return load(config, chat_template_config)


def load(config: RuntimeConfig, chat_template: ChatTemplateConfig | str | Path | None = None) -> Pipeline:
    """The second half of `pipeline()`: read tokenizer and weights of what was resolved."""

    def read_text_side() -> Frontend:
        return load_frontend(
            Path(config.model_path),
            session_len=config.session_len,
            vocab_size=config.vocab_size,
            chat_template=chat_template,
        )

    # Reading weights leaves the interpreter free.
    with ThreadPoolExecutor(1) as beside:
        frontend = beside.submit(read_text_side)
        engine = build_engine(config)
        return Pipeline(engine, frontend.result())


def _refuse(unknown: Mapping[str, Any], domains: object) -> None:
    if unknown:
        names = ", ".join(sorted(unknown))
        raise ConfigError(f"pipeline() has no argument {names}; engine options go into backend_config")
    if domains is not None:
        raise ConfigError("allowed_media_domains: images are not supported", param="allowed_media_domains")
