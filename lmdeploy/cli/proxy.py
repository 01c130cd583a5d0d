"""`lmdeploy serve proxy`: one address for several servers.

Owns its flags; what they mean is decided by `serve.proxy`.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from lmdeploy import env
from lmdeploy.errors import ConfigError

_SPLIT = "prefill and decode are not split over servers: every server does both"


def add_parser(commands: Any) -> None:
    """Add `proxy` to the parser of `lmdeploy serve`."""
    parser = commands.add_parser(
        "proxy",
        help="one address for several servers",
        description="Pass requests on to the servers that register (lmdeploy serve api_server --proxy-url),"
        " that are named with --nodes or that are added at /nodes/add.",
    )
    add = parser.add_argument
    add("--server-name", default="0.0.0.0", metavar="HOST", help="address to listen on (default: 0.0.0.0)")
    add("--server-port", type=int, default=8000, metavar="PORT", help="port (default: 8000; 0: a free one)")
    add("--nodes", nargs="+", default=[], metavar="URL", help="servers that are known from the start")
    add(
        "--routing-strategy",
        default="prefix_aware",
        metavar="NAME",
        help="prefix_aware: a server that has seen the beginning of the prompt, else the least loaded one;"
        " min_expected_latency: the least loaded; min_observed_latency: the one that answered fastest;"
        " random: by declared speed (default: prefix_aware)",
    )
    add("--api-keys", nargs="+", default=[], metavar="KEY", help="keys that let a client in; none: all may")
    add("--ssl", action="store_true", help="HTTPS with the files named by SSL_KEYFILE and SSL_CERTFILE")
    add(
        "--health-interval",
        type=float,
        metavar="S",
        help="seconds between two looks at every server (default: 5)",
    )
    add("--log-level", default="WARNING", metavar="LEVEL", help="level of messages (default: WARNING)")
    add("--disable-cache-status", action="store_true", help="no effect: the table of servers is never stored")
    hidden = {"help": argparse.SUPPRESS}
    add("--serving-strategy", choices=("Hybrid", "DistServe"), default="Hybrid", **hidden)
    add("--dummy-prefill", action="store_true", **hidden)
    for flag in ("--migration-protocol", "--link-type"):
        add(flag, **hidden)
    add("--disable-gdr", action="store_true", **hidden)


def run(args: argparse.Namespace) -> int:
    _check(args)
    # Imported here: parsers are built without loading the web server.
    from lmdeploy.logging import set_up
    from lmdeploy.serve.launch import Listener, bind, run_app
    from lmdeploy.serve.proxy.app import Watch, build_app
    from lmdeploy.serve.proxy.forward import Proxy
    from lmdeploy.serve.proxy.nodes import Nodes
    from lmdeploy.serve.proxy.routing import Router

    set_up(args.log_level)
    ssl = (env.SSL_KEYFILE.text(), env.SSL_CERTFILE.text()) if args.ssl else (None, None)
    listener = Listener(args.server_name, args.server_port, *ssl)
    nodes = Nodes()
    for url in args.nodes:
        nodes.add(url)
    proxy = Proxy(nodes, Router(args.routing_strategy), env.NODE_API_KEY.text())
    interval = args.health_interval or env.HEART_BEAT.number() or 5.0
    with bind(listener.host, listener.port) as sock:
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(args.server_name, args.server_name)
        address = f"{'https' if args.ssl else 'http'}://{host}:{sock.getsockname()[1]}"
        text = f"proxy for {len(nodes)} servers at {address}/v1; servers register with --proxy-url {address}"
        app = build_app(proxy, args.api_keys)
        run_app(app, Watch(proxy, interval), sock, listener, lambda: print(text, flush=True))
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raises ConfigError for flags that have no meaning here."""
    if args.serving_strategy != "Hybrid":
        raise ConfigError(f"--serving-strategy {args.serving_strategy} is not available: {_SPLIT}")
    for name in ("dummy_prefill", "migration_protocol", "link_type", "disable_gdr"):
        if getattr(args, name):
            raise ConfigError(f"--{name.replace('_', '-')} is not available: {_SPLIT}")
    if args.health_interval is not None and not 0.1 <= args.health_interval <= 3600:
        raise ConfigError("--health-interval must be between 0.1 and 3600 seconds")
    if args.ssl:
        for variable in (env.SSL_KEYFILE, env.SSL_CERTFILE):
            if not os.path.isfile(variable.text() or ""):
                raise ConfigError(f"--ssl needs {variable.name}, the path of a file, in the environment")
