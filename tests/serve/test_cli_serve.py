"""The command line of `lmdeploy serve`: flags that work, flags that are refused and why."""

from __future__ import annotations

import pytest

from lmdeploy.cli.flags import engine_config
from lmdeploy.cli.main import build_parser, main
from lmdeploy.cli.serve import _sampling_line
from lmdeploy.config import EngineConfig, PytorchEngineConfig, TurbomindEngineConfig


def complaint(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that `lmdeploy serve api_server MODEL argv` ends with."""
    try:
        code = main(["serve", "api_server", "no/such/model", *argv])
    except SystemExit as left:
        code = int(left.code or 0)
    error = capsys.readouterr().err
    assert code in (1, 2)
    assert error.count("\n") == 1, error
    return error


REFUSED = [
    (["--tp", "2"], "one engine on one machine"),
    (["--dp", "2"], "one engine on one machine"),
    (["--quant-policy", "5"], "quant-policy"),
    (["--communicator", "native"], "GPU"),
    (["--backend", "cuda"], "turbomind"),
    (["--proxy-url", "x"], "--proxy-url"),
    (["--proxy-url", "http://a b"], "--proxy-url"),
    (["--tool-call-parser", "no-such-format"], "hermes"),
    (["--reasoning-parser", "no-such-format"], "deepseek-r1"),
    (["--allowed-media-domains", "a", "b"], "text only"),
    (["--allow-terminate-by-client"], "SIGTERM"),
    (["--adapters", "a=b"], "adapters"),
    (["--meta-instruction", "x"], "--chat-template"),
    (["--qos-config-path", "x"], "--max-concurrent-requests"),
    (["--disable-vision-encoder"], "--language-model-only"),
    (["--logprobs-mode", "raw_logits"], "raw logits"),
    (["--device", "cuda"], "--backend pytorch"),
    (["--role", "Prefill"], "one machine"),
    (["--backend", "pytorch", "--communicator", "native"], "GPU"),
    (["--backend", "turbomind", "--dtype", "float32"], "bfloat16"),
    (["--cudagraph-capture-batch-sizes", "1", "2", "4"], "CUDA graph"),
    (["--enable-eplb"], "experts"),
    (["--speculative-algorithm", "eagle"], "ngram, draft_model"),
    (["--speculative-num-draft-tokens", "4"], "needs a method"),
    (["--speculative-config", "{"], "is not JSON"),
    (["--speculative-config", '{"methd": "ngram"}'], "methd"),
    (["--speculative-config", '{"method": "ngram"}', "--speculative-algorithm", "ngram"], "says everything"),
    (["--max-log-len", "-1"], "max-log-len"),
    (["--dtype", "float8"], "bfloat16"),
    (["--cache-max-entry-count", "1.5"], "cache_max_entry_count"),
    (["--session-len", "0"], "session_len"),
    (["--server-port", "99999"], "65535"),
    (["--server-port", "x"], "server-port"),
    (["--max-concurrent-requests", "0"], "at least 1"),
    (["--ssl"], "SSL_KEYFILE"),
    (["--ssl-keyfile", "no/file"], "--ssl-keyfile"),
    (["--ssl-keyfile", __file__, "--ssl-certfile", __file__], "no certificate with its key"),
    (["--max-body-size", "big"], "no size"),
    (["--memory-budget", "1000000GiB"], "memory budget"),
    (["--api-keys", "@no/file"], "file of API keys"),
    (["--access-log", "no/folder/file"], "--access-log"),
    (["--access-log-prompts"], "needs --access-log"),
    (["--stall-timeout", "0"], "--stall-timeout"),
    (["--shutdown-timeout", "-1"], "--shutdown-timeout"),
    (["--request-timeout", "0"], "--request-timeout"),
    (["--key-tokens-per-minute", "0", "--api-keys", "a"], "--key-tokens-per-minute"),
    (["--key-requests-per-minute", "5"], "needs --api-keys"),
    (["--config", "no/file"], "--config"),
    (["--log-level", "loud"], "log level"),
    (["--no-such-flag"], "--no-such-flag"),
]


@pytest.mark.parametrize(
    ("argv", "reason"), REFUSED, ids=lambda x: " ".join(x) if isinstance(x, list) else None
)
def test_refused_flags(capsys: pytest.CaptureFixture[str], argv: list[str], reason: str) -> None:
    assert reason in complaint(capsys, *argv)


ACCEPTED = [
    ["--tp", "1", "--communicator", "nccl", "--async", "1", "--quant-policy", "0"],
    [
        "--backend",
        "pytorch",
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--eager-mode",
        "--communicator",
        "nccl",
    ],
    ["--backend", "turbomind", "--eager-mode"],
    ["--model-name", "a", "--model-name", "b"],
    ["--api-keys", "k1", "k2"],
    ["--allow-origins", "http://a", "http://b", "--allow-credentials"],
    ["--session_len", "512", "--max_batch_size", "4", "--cache_max_entry_count", "0.5"],
    ["--enable-prefix-caching"],
    ["--max-body-size", "64MiB", "--memory-budget", "100MiB", "--stall-timeout", "30"],
    ["--api-keys", "@/dev/null", "--access-log", "/dev/null", "--access-log-prompts"],
    ["--otlp-traces-endpoint", "http://127.0.0.1:1/v1/traces", "--shutdown-timeout", "2.5"],
    ["--no-enable-prefix-caching"],
    ["--disable-prefix-caching"],
    ["--disable-fastapi-docs", "--disable-metrics", "--language-model-only", "--trust-remote-code"],
    ["--generation-config", "lmdeploy", "--max-log-len", "10", "--model-format", "gguf"],
]


@pytest.mark.parametrize("argv", ACCEPTED, ids=" ".join)
def test_accepted_flags(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    """All that is left to complain of is the model."""
    assert "no/such/model" in complaint(capsys, "--server-port", "0", "--server-name", "127.0.0.1", *argv)


def test_flags_reach_the_engine_config() -> None:
    argv = [
        "serve",
        "api_server",
        "m",
        "--session-len",
        "64",
        "--max-batch-size",
        "3",
        "--disable-prefix-caching",
    ]
    config = engine_config(build_parser().parse_args(argv))
    assert type(config) is EngineConfig
    assert (config.session_len, config.max_batch_size, config.enable_prefix_caching) == (64, 3, False)
    assert config.cache_block_seq_len == TurbomindEngineConfig().cache_block_seq_len


@pytest.mark.parametrize(
    ("backend", "cls"), [("turbomind", TurbomindEngineConfig), ("pytorch", PytorchEngineConfig)]
)
def test_backend_names_the_config(backend: str, cls: type) -> None:
    argv = ["serve", "api_server", "m", "--backend", backend, "--session-len", "64"]
    config = engine_config(build_parser().parse_args(argv))
    assert type(config) is cls
    assert config.session_len == 64


def test_defaults_of_the_model_are_said() -> None:
    neutral = {"temperature": 1.0, "top_k": 0.0}
    assert _sampling_line(neutral, neutral) == ""
    line = _sampling_line({"temperature": 0.6, "top_k": 20.0}, neutral)
    assert "temperature 0.6, top_k 20" in line
    assert "--generation-config lmdeploy" in line


@pytest.mark.parametrize(
    "argv",
    [
        ["gradio", "x"],
        ["api_client", "http://x"],
        ["triton_client"],
    ],
    ids=" ".join,
)
def test_commands_of_other_versions(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    assert main(["serve", *argv]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"`lmdeploy serve {argv[0]}`" in error
