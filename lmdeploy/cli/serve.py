"""`lmdeploy serve api_server MODEL`: an OpenAI-compatible server; `serve proxy` has a file of its own.

Owns its flags; what they mean is decided by `config`, `runtime.resolve` and `serve`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lmdeploy import env
from lmdeploy.cli import proxy
from lmdeploy.cli.config_file import accept_config, settings_of, yaml_text
from lmdeploy.cli.flags import (
    add_engine_flags,
    add_speculative_flags,
    byte_count,
    engine_config,
    speculative_args,
)
from lmdeploy.cli.operation import (
    about,
    add_operation_flags,
    check_operation,
    reports_of,
    settings_text,
    ssl_files,
)
from lmdeploy.cli.several import models_of
from lmdeploy.errors import ConfigError
from lmdeploy.runtime.memory_plan import MAX_BODIES

if TYPE_CHECKING:
    from lmdeploy.runtime.resolve import RuntimeConfig
    from lmdeploy.serve.launch import Listener
    from lmdeploy.serve.registration import Registration
    from lmdeploy.serve.served import Served

MOST_KEPT_PROMPTS = 10_000
_ABSENT_FLAGS = {
    "allowed_media_domains": "models here read text only",
    "vision_max_batch_size": "models here read text only",
    "allow_terminate_by_client": "stop the server with SIGTERM or Ctrl-C",
}


def add_parser(subparsers: Any) -> None:
    serve = subparsers.add_parser("serve", help="serve a model over HTTP")
    commands = serve.add_subparsers(dest="serve_command", metavar="COMMAND", required=True)
    parser = commands.add_parser(
        "api_server",
        aliases=["api-server"],
        help="an OpenAI-compatible server",
        description="Serve a model at /v1/chat/completions and /v1/completions.",
    )
    parser.add_argument(
        "model_path",
        metavar="MODEL",
        nargs="?",
        help="directory, GGUF file or hub id; or `model`, or several `models`, in the file of --config",
    )
    accept_config(parser, "model", own=("models",))
    _add_server_flags(parser.add_argument_group("server"))
    add_operation_flags(parser.add_argument_group("operation"))
    _add_flags_of_a_model(parser)
    for name in _ABSENT_FLAGS:
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, dest=name, nargs="*", default=None, help=argparse.SUPPRESS)
    proxy.add_parser(commands)


def _add_flags_of_a_model(parser: argparse.ArgumentParser) -> None:
    """Those that a server of several models takes for each of them."""
    _add_model_flags(parser.add_argument_group("model"))
    engine = parser.add_argument_group("engine")
    add_engine_flags(engine)
    add_speculative_flags(engine)
    engine.add_argument(
        "--disable-prefix-caching",
        dest="enable_prefix_caching",
        action="store_const",
        const=False,
        default=argparse.SUPPRESS,
        help="the same as --no-enable-prefix-caching",
    )


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--server-name", default="0.0.0.0", metavar="HOST", help="address to listen on (default: 0.0.0.0)")
    add("--server-port", type=int, default=23333, metavar="PORT", help="port (default: 23333; 0: a free one)")
    add("--allow-origins", nargs="+", default=["*"], metavar="ORIGIN", help="CORS origins (default: *)")
    add("--allow-methods", nargs="+", default=["*"], metavar="METHOD", help="CORS methods (default: *)")
    add("--allow-headers", nargs="+", default=["*"], metavar="HEADER", help="CORS headers (default: *)")
    add("--allow-credentials", action="store_true", help="CORS credentials")
    add(
        "--api-keys",
        nargs="+",
        default=[],
        metavar="KEY",
        help="keys that let a client in, `sha256:` and the hash of one, or @FILE with one (or NAME KEY) a "
        "line, which is read again when it changes; none: all may",
    )
    add("--ssl", action="store_true", help="HTTPS with the files named by SSL_KEYFILE and SSL_CERTFILE")
    add("--ssl-keyfile", metavar="FILE", help="HTTPS with this private key")
    add("--ssl-certfile", metavar="FILE", help="HTTPS with this certificate chain")
    add(
        "--max-body-size",
        type=byte_count,
        default=MAX_BODIES,
        metavar="SIZE",
        help="largest body of a request, and of all bodies held at once, such as 64MiB (default: 32MiB)",
    )
    add("--proxy-url", metavar="URL", help="register at this `lmdeploy serve proxy`")
    add(
        "--max-concurrent-requests",
        type=int,
        default=1024,
        metavar="N",
        help="requests held at once, running or waiting; more are answered 429 (default: 1024)",
    )
    add(
        "--log-level", default="WARNING", metavar="LEVEL", help="REQUEST also logs prompts (default: WARNING)"
    )
    add("--max-log-len", type=int, metavar="N", help="characters of a prompt that are logged (default: all)")
    add(
        "--enable-abort-handling",
        action="store_true",
        help="/abort_request ends requests by their request_id or session_id, anybody's",
    )
    add(
        "--enable-sleep-mode",
        action="store_true",
        help="/sleep gives all memory of a model back until /wakeup",
    )
    add("--disable-web-page", action="store_true", help="no page at /")
    add("--disable-fastapi-docs", action="store_true", help="no /openapi.json and no /docs")


def _add_model_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--model-name",
        action="append",
        default=[],
        metavar="NAME",
        help="name of the model for clients, may be repeated; the last part of MODEL always works too",
    )
    add("--chat-template", metavar="FILE", help="chat template (Jinja or JSON) in place of the model's own")
    add(
        "--generation-config",
        default="auto",
        metavar="SOURCE",
        help="sampling defaults: auto (the model's), lmdeploy (none) or a folder (default: auto)",
    )
    add(
        "--tool-call-parser",
        default="auto",
        metavar="NAME",
        help="how tool calls are read: auto (as the chat template writes them), none or a format's name",
    )
    add(
        "--reasoning-parser",
        default="auto",
        metavar="NAME",
        help="how reasoning is told from the answer: auto, none or a format's name",
    )
    add(
        "--named-tool-finish",
        default="stop",
        choices=("stop", "tool_calls"),
        help="finish_reason of an answer that calls the tool named by tool_choice (default: stop)",
    )
    add(
        "--keep-prompts",
        type=int,
        default=0,
        metavar="N",
        help="keep the last N prompts; GET /prompts/ID shows them, to everybody with a key (default: 0)",
    )
    add("--trust-remote-code", action="store_true", help="no effect: code of a model is never run")


def run(args: argparse.Namespace) -> int:
    if args.serve_command == "proxy":
        return proxy.run(args)
    if args.print_config:
        print(yaml_text(settings_of(args.config_parser, args, "model")), end="")
        return 0
    _check(args)
    return _serve(args, models_of(args, _add_flags_of_a_model))


def _check(args: argparse.Namespace) -> None:
    """Raises ConfigError for flags that have no meaning here or contradict each other."""
    for name, instead in _ABSENT_FLAGS.items():
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} is not available: {instead}")
    if args.max_concurrent_requests < 1:
        raise ConfigError("--max-concurrent-requests must be at least 1")
    if args.max_log_len is not None and args.max_log_len < 0:
        raise ConfigError("--max-log-len must not be negative")
    if not 0 <= args.keep_prompts <= MOST_KEPT_PROMPTS:
        raise ConfigError(f"--keep-prompts must be between 0 and {MOST_KEPT_PROMPTS}")
    check_operation(args)


def _serve(args: argparse.Namespace, models: list[argparse.Namespace]) -> int:
    # Imported here: parsers are built without loading the web server or an engine.
    from threading import Thread

    from lmdeploy.logging import set_up
    from lmdeploy.serve.keys import Keys
    from lmdeploy.serve.launch import Listener, bind, run_server
    from lmdeploy.serve.parsers.select import choose
    from lmdeploy.serve.registration import Registered
    from lmdeploy.serve.served import Server

    set_up(args.log_level)
    Keys(args.api_keys)  # a file at fault is told before anything is loaded, as are names of no parser
    for model in models:
        choose(model.tool_call_parser, model.reasoning_parser, {})
    listener = Listener(args.server_name, args.server_port, *ssl_files(args))
    with bind(listener.host, listener.port) as sock, reports_of(args) as reports:
        port = sock.getsockname()[1]
        registration = _registration(args, listener, port)
        print(settings_text(args), end="", flush=True)
        configs = _resolved(args, models)
        served = tuple(_served(model, config) for model, config in zip(models, configs, strict=True))
        server = Server(served, _options(args), reports=reports)
        names = tuple(name for one in served for name in one.ids)
        for one in served:
            # While the engine loads: in the middle of other people's streams it would be a pause.
            Thread(target=one.frontend.tokenizer.prepare, daemon=True).start()
        run_server(
            server,
            sock,
            listener,
            lambda: _announce(listener, port, names),
            lambda engines: engines if registration is None else Registered(engines, registration, names),
            args.shutdown_timeout,
        )
    return 0


def _resolved(args: argparse.Namespace, models: list[argparse.Namespace]) -> Sequence[RuntimeConfig]:
    """The plan of every model, printed before anything is loaded."""
    from lmdeploy.runtime.resolve import plan_table, resolve
    from lmdeploy.runtime.together import Wanted, resolve_together, together_table

    if len(models) == 1 and args.memory_budget is None:
        config = resolve(
            models[0].model_path,
            engine_config(models[0]),
            speculative=speculative_args(models[0]),
            server=True,
            bodies=args.max_body_size,
        )
        print(plan_table(config), flush=True)
        return [config]
    wanted = [Wanted(m.model_path, engine_config(m), speculative_args(m), m.share) for m in models]
    together = resolve_together(wanted, memory=args.memory_budget, bodies=args.max_body_size)
    print(together_table(together, [_names(m)[0] for m in models]), flush=True)
    return together.configs


def _names(model: argparse.Namespace) -> list[str]:
    from lmdeploy.models.hub import model_name

    return [*model.model_name, model_name(model.model_path)]


def _served(model: argparse.Namespace, config: RuntimeConfig) -> Served:
    from pathlib import Path

    from lmdeploy.runtime.client import ProcessClient
    from lmdeploy.runtime.generate import load_frontend
    from lmdeploy.runtime.messages import Recipe
    from lmdeploy.serve.kept_prompts import KeptPrompts
    from lmdeploy.serve.parsers.select import choose
    from lmdeploy.serve.served import SAMPLING_DEFAULTS, Served

    frontend = load_frontend(
        Path(config.model_path),
        session_len=config.session_len,
        vocab_size=config.vocab_size,
        chat_template=model.chat_template,
        interface_defaults=SAMPLING_DEFAULTS,
        generation_config=model.generation_config,
    )
    print(_sampling_line(frontend.sampling_defaults, SAMPLING_DEFAULTS), end="", flush=True)
    parsers = choose(model.tool_call_parser, model.reasoning_parser, frontend.chat_template.texts)
    print(parsers.line, flush=True)
    recipe = Recipe.of("lmdeploy.runtime.build:build_engine", config)
    client = ProcessClient(recipe, stalled_step=model.stall_timeout)
    return Served(
        frontend,
        client,
        model.model_path,
        tuple(model.model_name),
        model.max_log_len,
        log_prompts=model.access_log_prompts,
        parsers=parsers,
        kept=KeptPrompts(model.keep_prompts) if model.keep_prompts else None,
        about=about(config),
        by_path=model.by_path,
    )


def _registration(args: argparse.Namespace, listener: Listener, port: int) -> Registration | None:
    """What `--proxy-url` asks for. Raises ConfigError."""
    from lmdeploy.serve.registration import Registration

    if args.proxy_url is None:
        return None
    try:
        return Registration(args.proxy_url, listener, port, env.PROXY_API_KEY.text())
    except ConfigError as error:
        raise ConfigError(f"--proxy-url: {error.message}") from None


def _sampling_line(defaults: Mapping[str, float], neutral: Mapping[str, float]) -> str:
    """What the model's own files set for requests that are silent; nothing when they set nothing."""
    own = [f"{name} {value:g}" for name, value in defaults.items() if value != neutral.get(name)]
    switch = "--generation-config lmdeploy ignores it"
    return f"requests that are silent get the model's {', '.join(own)}; {switch}\n" if own else ""


def _announce(listener: Listener, port: int, names: Sequence[str]) -> None:
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(listener.host, listener.host)
    scheme = "https" if listener.ssl_keyfile else "http"
    print(f"serving {', '.join(names)} at {scheme}://{host}:{port}/v1", flush=True)


def _options(args: argparse.Namespace) -> Any:
    from lmdeploy.serve.served import ServerOptions

    return ServerOptions(
        api_keys=tuple(args.api_keys),
        allow_origins=tuple(args.allow_origins),
        allow_methods=tuple(args.allow_methods),
        allow_headers=tuple(args.allow_headers),
        allow_credentials=args.allow_credentials,
        max_requests=args.max_concurrent_requests,
        key_requests=args.key_requests_per_minute,
        key_tokens=args.key_tokens_per_minute,
        request_timeout=args.request_timeout,
        docs=not args.disable_fastapi_docs,
        abort_handling=args.enable_abort_handling,
        named_tool_finish=args.named_tool_finish,
        sleep_mode=args.enable_sleep_mode,
        web_page=not args.disable_web_page,
        metrics=not args.disable_metrics,
        max_body=args.max_body_size,
        max_bodies=args.max_body_size,
    )
