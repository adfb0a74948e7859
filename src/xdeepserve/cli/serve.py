"""`xdeepserve serve`: run the OpenAI-compatible endpoint until a signal."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xdeepserve import wings
from xdeepserve.cli.options import (
    Parser,
    add_deployment,
    add_faults,
    add_mtp,
    check_writable,
    faults_of,
    note_rounding,
    note_settings,
    note_tokenizer,
    overrides_of,
)
from xdeepserve.errors import InputError
from xdeepserve.progress import working

if TYPE_CHECKING:
    from xdeepserve.api.server.options import ServerOptions


def add_options(parser: Parser) -> None:
    """Add the options: model, deployment, and where to listen."""
    add_deployment(parser, takes_configs=False)
    add_mtp(parser)
    add_faults(parser)
    parser.add_argument("--host", help="default 127.0.0.1")
    parser.add_argument("--port", type=int, help="default 8000; 0 picks a free one")
    parser.add_argument(
        "--strict",
        action="store_true",
        help="refuse request fields without effect",
    )
    parser.add_argument(
        "--generation-config",
        choices=("auto", "vllm"),
        default="auto",
        help="vllm: no sampling defaults of the checkpoint",
    )
    parser.add_argument(
        "--max-body-bytes",
        type=int,
        metavar="N",
        help="default: 32 per token of context",
    )
    parser.add_argument(
        "--admin",
        action="store_true",
        help="let clients list, add and remove task executors: /admin/tes (use it with --api-key)",
    )
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="write what the page draws, to be opened there"
    )
    parser.add_argument(
        "--state",
        type=Path,
        metavar="DIR",
        help="take files and jobs (/v1/files, /v1/fine_tuning/jobs), kept there: xdeepserve docs jobs",
    )
    parser.add_argument(
        "--tools",
        type=Path,
        metavar="FILE",
        help="Python functions that agents may call (xdeepserve docs jobs)",
    )
    parser.add_argument("--member", help=argparse.SUPPRESS)  # of `xdeepserve cluster`, which starts it
    parser.add_argument("--share", help=argparse.SUPPRESS)  # both of `cluster --shared`
    parser.add_argument("--pod", help=argparse.SUPPRESS)
    parser.add_argument("--uds", metavar="PATH", help="listen on a Unix socket instead")
    parser.add_argument(
        "--served-model-name", nargs="+", default=[], metavar="NAME", help="what clients may call the model"
    )
    parser.add_argument(
        "--api-key", nargs="+", default=[], metavar="KEY", help="require one of these from clients"
    )
    parser.add_argument(
        "--allowed-origins",
        nargs="+",
        default=[],
        metavar="ORIGIN",
        help="web pages that may call from a browser (CORS); '*' for all; default none",
    )
    parser.add_argument(
        "--allowed-hosts",
        nargs="+",
        default=[],
        metavar="NAME",
        help="names that clients may call this server by, beside localhost; '*' for all",
    )
    parser.add_argument("--log-requests", action="store_true", help="log a line for each request")
    parser.add_argument("--quiet", action="store_true", help="log nothing but bugs of the server")
    parser.add_argument("--ssl-certfile", metavar="PEM", help="serve https with this certificate")
    parser.add_argument("--ssl-keyfile", metavar="PEM", help="its key, if that is a file of its own")


def run(args: argparse.Namespace) -> int:
    """Load the model and answer requests until SIGINT or SIGTERM."""
    from xdeepserve.api.server.server import run_server
    from xdeepserve.api.server.server_log import log_to
    from xdeepserve.model.presets import resolve_model

    host = "127.0.0.1" if args.host is None else args.host
    port = 8000 if args.port is None else args.port
    engine, options = made(args, host, port)
    note_settings(args)
    note_rounding(args, resolve_model(args.model))
    note_tokenizer(args, engine.tokenizer)
    with contextlib.ExitStack() as starting:
        status = starting.enter_context(working(f"Loading {args.model}", runs_int8=args.precision == "int8"))
        engine.load(status.progress)
        status.text, status.detail = f"Warming up {args.model}", ""

        def ready(address: str) -> None:
            starting.close()
            name = options.served_model_names[0] if options.served_model_names else engine.model_name
            what = f"model {name}, {args.precision}, deployment {args.deployment}"
            print(f"xdeepserve serve: {what}; Ctrl-C ends it", file=sys.stderr, flush=True)
            print(f"listening on {address}", flush=True)

        with log_to(lambda line: os.write(2, line.encode()), logging.ERROR if args.quiet else logging.INFO):
            run_server(lambda: engine, host, port, ready, options)
    print("xdeepserve serve: has shut down", file=sys.stderr, flush=True)
    return 0


def made(args: argparse.Namespace, host: str, port: int) -> tuple[Any, ServerOptions]:
    """Build the engine, with nothing loaded, and the server's options. With --pod the engine is that of a job
    executor, whose TEs are elsewhere. Raises InputError for options that cannot work."""
    from xdeepserve.llm import build_engine

    options = _options(args, host, port)
    if args.pod is not None:
        return wings.part("remote engine")(args.pod, args.member), options
    faults = faults_of(args)
    engine = build_engine(
        args.model, args.deployment, args.precision, overrides=overrides_of(args), warm_up=True, faults=faults
    )
    return engine, options


def _options(args: argparse.Namespace, host: str, port: int) -> ServerOptions:
    """Make the server's options. Raises InputError for those that cannot work, before a large model is
    loaded."""
    from xdeepserve.api.server.options import ServerOptions
    from xdeepserve.api.server.server import bind

    if args.quiet and args.log_requests:
        raise InputError("--quiet logs no requests: leave --log-requests out")
    if args.uds is not None and (args.host is not None or args.port is not None):
        raise InputError("--uds is instead of --host and --port: leave these out")
    options = ServerOptions(
        served_model_names=tuple(args.served_model_name),
        api_keys=tuple(args.api_key),
        allowed_origins=tuple(args.allowed_origins),
        allowed_hosts=tuple(args.allowed_hosts),
        ssl_certfile=args.ssl_certfile,
        ssl_keyfile=args.ssl_keyfile,
        uds=args.uds,
        admin=args.admin,
        strict=args.strict,
        generation_config=args.generation_config,
        max_body_bytes=args.max_body_bytes,
        log_requests=args.log_requests,
        record=args.record,
        state=args.state,
        tools=args.tools,
        member=args.member,
        share=args.share,
        pod=args.pod,
    )
    options.ssl_context()
    if args.record is not None:
        check_writable(args.record, "--record")
    wings.part("options of jobs")(options)
    if args.uds is None:
        bind(host, port).close()
    return options
