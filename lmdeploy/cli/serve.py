"""`lmdeploy serve api_server MODEL`: an OpenAI-compatible server; `serve proxy` has a file of its own.

Owns its flags; what they mean is decided by `config`, `runtime.resolve` and `serve`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lmdeploy import env
from lmdeploy.cli import proxy
from lmdeploy.cli.flags import (
    add_engine_flags,
    add_speculative_flags,
    engine_config,
    speculative_args,
)
from lmdeploy.config import EngineConfig
from lmdeploy.errors import ConfigError

if TYPE_CHECKING:
    from lmdeploy.serve.launch import Listener
    from lmdeploy.serve.registration import Registration

MOST_KEPT_PROMPTS = 10_000
_ABSENT_FLAGS = {
    "allowed_media_domains": "models here read text only",
    "vision_max_batch_size": "models here read text only",
    "allow_terminate_by_client": "stop the server with SIGTERM or Ctrl-C",
    "enable_abort_handling": "a request is stopped by closing its connection",
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
    parser.add_argument("model_path", metavar="MODEL", help="directory, GGUF file or hub id")
    _add_server_flags(parser.add_argument_group("server"))
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
    for name in _ABSENT_FLAGS:
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, dest=name, nargs="*", default=None, help=argparse.SUPPRESS)
    proxy.add_parser(commands)


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--server-name", default="0.0.0.0", metavar="HOST", help="address to listen on (default: 0.0.0.0)")
    add("--server-port", type=int, default=23333, metavar="PORT", help="port (default: 23333; 0: a free one)")
    add("--allow-origins", nargs="+", default=["*"], metavar="ORIGIN", help="CORS origins (default: *)")
    add("--allow-methods", nargs="+", default=["*"], metavar="METHOD", help="CORS methods (default: *)")
    add("--allow-headers", nargs="+", default=["*"], metavar="HEADER", help="CORS headers (default: *)")
    add("--allow-credentials", action="store_true", help="CORS credentials")
    add("--api-keys", nargs="+", default=[], metavar="KEY", help="keys that let a client in; none: all may")
    add("--ssl", action="store_true", help="HTTPS with the files named by SSL_KEYFILE and SSL_CERTFILE")
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
    add("--disable-metrics", action="store_true", help="no /metrics")
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
    _check(args)
    return _serve(args, engine_config(args))


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
    if args.ssl:
        for variable in (env.SSL_KEYFILE, env.SSL_CERTFILE):
            if not os.path.isfile(variable.text() or ""):
                raise ConfigError(f"--ssl needs {variable.name}, the path of a file, in the environment")


def _serve(args: argparse.Namespace, engine: EngineConfig) -> int:
    # Imported here: parsers are built without loading the web server or an engine.
    from pathlib import Path
    from threading import Thread

    from lmdeploy.logging import set_up
    from lmdeploy.runtime.client import ProcessClient
    from lmdeploy.runtime.generate import load_frontend
    from lmdeploy.runtime.messages import Recipe
    from lmdeploy.runtime.resolve import plan_table, resolve
    from lmdeploy.serve.kept_prompts import KeptPrompts
    from lmdeploy.serve.launch import Listener, bind, run_server
    from lmdeploy.serve.parsers.select import choose
    from lmdeploy.serve.registration import Registered
    from lmdeploy.serve.served import SAMPLING_DEFAULTS, Served, Server

    set_up(args.log_level)
    ssl = (env.SSL_KEYFILE.text(), env.SSL_CERTFILE.text()) if args.ssl else (None, None)
    listener = Listener(args.server_name, args.server_port, *ssl)
    choose(args.tool_call_parser, args.reasoning_parser, {})
    with bind(listener.host, listener.port) as sock:
        port = sock.getsockname()[1]
        registration = _registration(args, listener, port)
        config = resolve(args.model_path, engine, speculative=speculative_args(args), server=True)
        print(plan_table(config), flush=True)
        frontend = load_frontend(
            Path(config.model_path),
            session_len=config.session_len,
            vocab_size=config.vocab_size,
            chat_template=args.chat_template,
            interface_defaults=SAMPLING_DEFAULTS,
            generation_config=args.generation_config,
        )
        print(_sampling_line(frontend.sampling_defaults, SAMPLING_DEFAULTS), end="", flush=True)
        client = ProcessClient(Recipe.of("lmdeploy.runtime.build:build_engine", config))
        parsers = choose(args.tool_call_parser, args.reasoning_parser, frontend.chat_template.texts)
        print(parsers.line, flush=True)
        served = Served(
            frontend,
            client,
            args.model_path,
            tuple(args.model_name),
            args.max_log_len,
            parsers=parsers,
            kept=KeptPrompts(args.keep_prompts) if args.keep_prompts else None,
        )
        # While the engine loads: in the middle of other people's streams it would be a pause.
        Thread(target=frontend.tokenizer.prepare, daemon=True).start()
        run_server(
            Server((served,), _options(args)),
            sock,
            listener,
            lambda: _announce(args, port, served.ids),
            lambda engines: (
                engines if registration is None else Registered(engines, registration, served.ids)
            ),
        )
    return 0


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


def _announce(args: argparse.Namespace, port: int, names: tuple[str, ...]) -> None:
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(args.server_name, args.server_name)
    scheme = "https" if args.ssl else "http"
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
        docs=not args.disable_fastapi_docs,
        named_tool_finish=args.named_tool_finish,
        web_page=not args.disable_web_page,
        metrics=not args.disable_metrics,
    )
