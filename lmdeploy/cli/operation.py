"""How a server is run, as flags: settings from a file, logs and traces, patience, TLS.

Owns these flags and what is made of them before the server starts. Knows no model and no engine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import ssl
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lmdeploy import env
from lmdeploy.cli.config_file import settings_of, yaml_text
from lmdeploy.cli.flags import byte_count
from lmdeploy.errors import ConfigError

if TYPE_CHECKING:
    from lmdeploy.runtime.resolve import RuntimeConfig
    from lmdeploy.serve.served import Report


def add_operation_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--config", metavar="FILE", help="YAML file of flags without their dashes; those given here win")
    add(
        "--memory-budget",
        type=byte_count,
        metavar="SIZE",
        help="most memory that the models and the server together may take, such as 12GiB (default: what is "
        "free)",
    )
    add("--print-config", action="store_true", help="print all settings as such a file, and end")
    add("--disable-metrics", action="store_true", help="no /metrics")
    add("--access-log", metavar="FILE", help="a line of JSON for each request into this file; -: stdout")
    add("--access-log-prompts", action="store_true", help="with the prompts, cut by --max-log-len")
    add(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send traces to this OpenTelemetry collector, such as http://localhost:4318/v1/traces "
        "(extra: otel)",
    )
    add(
        "--key-requests-per-minute",
        type=int,
        metavar="N",
        help="requests that one API key may start in a minute; more are answered 429 (default: any number)",
    )
    add(
        "--key-tokens-per-minute",
        type=int,
        metavar="N",
        help="tokens of prompts and answers that one API key may use in a minute (default: any number)",
    )
    add(
        "--request-timeout",
        type=float,
        metavar="SECONDS",
        help="longest time for the answers of a request, which then ends with an error (default: any)",
    )
    add(
        "--stall-timeout",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="a step that takes longer makes the server unhealthy, one three times as long ends the engine, "
        "which is started again (default: 120; never less than ten times the longest step expected)",
    )
    add(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="what runs may go on for so long after SIGTERM (default: 30)",
    )


def check_operation(args: argparse.Namespace) -> None:
    """Raises ConfigError for values that cannot work."""
    for name in ("stall_timeout", "shutdown_timeout", "request_timeout"):
        if getattr(args, name) is not None and not 0 < getattr(args, name) < 1e6:
            raise ConfigError(f"--{name.replace('_', '-')} must be a number of seconds above 0")
    for name in ("key_requests_per_minute", "key_tokens_per_minute"):
        flag, value = "--" + name.replace("_", "-"), getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"{flag} must be at least 1")
        if value is not None and not args.api_keys:
            raise ConfigError(f"{flag} needs --api-keys: without keys nobody can be told from another")
    if args.access_log_prompts and not args.access_log:
        raise ConfigError("--access-log-prompts needs --access-log")


def ssl_files(args: argparse.Namespace) -> tuple[str | None, str | None]:
    """Key and certificates, of flags or environment; None: no TLS. Raises ConfigError."""
    if not (args.ssl or args.ssl_keyfile or args.ssl_certfile):
        return None, None
    found = []
    for name, variable in (("ssl_keyfile", env.SSL_KEYFILE), ("ssl_certfile", env.SSL_CERTFILE)):
        path = getattr(args, name) or variable.text() or ""
        if not os.path.isfile(path):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"HTTPS needs {flag} or {variable.name} in the environment: the path of a file")
        found.append(path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(found[1], found[0])
    except (ssl.SSLError, OSError) as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError(f"{found[1]} and {found[0]} are no certificate with its key: {reason}") from None
    return found[0], found[1]


def settings_text(args: argparse.Namespace) -> str:
    """What flags and file say, as lines of such a file; nothing where no file was given."""
    if args.config is None:
        return ""
    told = settings_of(args.config_parser, args, "model", only=args.config_given)
    models = {"models": args.config_own["models"]} if args.config_own.get("models") else {}
    return yaml_text({**told, **models})


def about(config: RuntimeConfig) -> dict[str, str]:
    """What /metrics says of the engine."""
    values = {
        "backend": config.backend,
        "device": config.device,
        "kernels": config.kernels,
        "session_len": config.session_len,
        "max_batch_size": config.max_batch_size,
        "max_prefill_token_num": config.max_prefill_token_num,
        "kv_bits": config.limits.kv_bits,
        "num_threads": config.limits.num_threads,
        "enable_prefix_caching": config.enable_prefix_caching,
    }
    return {name: str(value) for name, value in values.items()}


@contextlib.contextmanager
def reports_of(args: argparse.Namespace) -> Iterator[tuple[Report, ...]]:
    """What hears of every request that has ended."""
    from lmdeploy.serve.access_log import AccessLog
    from lmdeploy.serve.tracing import Tracing

    with contextlib.ExitStack() as stack:
        reports: list[Report] = []
        if args.access_log:
            reports.append(stack.enter_context(contextlib.closing(AccessLog(args.access_log))))
        if args.otlp_traces_endpoint:
            reports.append(stack.enter_context(contextlib.closing(Tracing(args.otlp_traces_endpoint))))
        yield tuple(reports)
