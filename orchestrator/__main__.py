"""The command line: `python -m orchestrator serve|reload|doctor|chat|talk|keys|quality`."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from orchestrator.chat import ChatError, chat_loop, chat_once
from orchestrator.config import ConfigError
from orchestrator.limits import command as keys_command
from orchestrator.quality import command as quality_command
from orchestrator.talk import TalkError, talk
from orchestrator.triton import doctor, reload
from orchestrator.triton.front import FrontOptions
from orchestrator.triton.ports import FLAGS, LOOPBACK, Ports
from orchestrator.triton.process import StartError
from orchestrator.triton.supervisor import ServeOptions, serve


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code (argparse itself exits with 2 on wrong usage)."""
    parser = argparse.ArgumentParser(prog="python -m orchestrator", description="Real-time AI on NVIDIA Triton.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_serve(commands.add_parser("serve", help="run Triton, the gateway and the gRPC front from an artifact"))
    reload.add_arguments(commands.add_parser("reload", help="have a running serve take what is new, without a pause"))
    doctor.add_arguments(
        commands.add_parser("doctor", help="compare an artifact with its manifest and with this machine")
    )
    _add_chat(commands.add_parser("chat", help="talk to a running server in the terminal"))
    _add_talk(commands.add_parser("talk", help="ask a running server a recorded question, and have it answered aloud"))
    keys_command.add_arguments(commands.add_parser("keys", help="make, show and take back API keys"))
    quality_command.add_arguments(commands.add_parser("quality", help="what the quality monitor of a server knows"))
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except (StartError, ChatError, TalkError, ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130  # as a shell reports an end by Ctrl-C
    return 0


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", type=Path, help="what `python -m build` made, such as artifacts/cpu")
    parser.add_argument("--host", default=ServeOptions.host, help="where the gateway listens (default %(default)s)")
    parser.add_argument(
        "--grpc-front-host", default=FrontOptions.host, help="where the gRPC front listens (default %(default)s)"
    )
    parser.add_argument("--grpc-front-cert", type=Path, metavar="PEM", help="the gRPC front's certificate chain")
    parser.add_argument("--grpc-front-key", type=Path, metavar="PEM", help="its private key; both give it TLS")
    for flag, port in zip(FLAGS, Ports()):
        parser.add_argument(
            flag, type=_port, default=port, metavar="PORT", help="default %(default)s; 0 = choose a free one"
        )
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="logs and serve.json (default .run/<port>)")
    parser.add_argument(
        "--keys", type=Path, metavar="FILE", help="the API keys (`keys add` makes it); needed beyond loopback"
    )
    parser.add_argument(
        "--backend-directory",
        type=Path,
        metavar="DIR",
        help="further Triton backends, a folder each; they come before the installation's own of the same name",
    )
    parser.add_argument(
        "--drain-timeout-s",
        type=_seconds,
        default=ServeOptions.drain_timeout_s,
        metavar="S",
        help="how long running requests may take to end after SIGTERM (default %(default)s)",
    )
    parser.add_argument(
        "--gateway-workers",
        type=_workers,
        default=ServeOptions.gateway_workers,
        metavar="N",
        help="gateway processes that share the port (default %(default)s)",
    )
    parser.add_argument(
        "--replicas",
        type=_replicas,
        default=ServeOptions.num_replicas,
        metavar="N",
        help="Tritons behind gateway and gRPC front; on GPUs each has its own (default %(default)s)",
    )
    parser.add_argument(
        "--allow-host",
        type=_host,
        action="append",
        default=[],
        metavar="NAME",
        help="a further name that callers may use for this server; repeatable",
    )
    parser.add_argument(
        "--allow-origin",
        type=_origin,
        action="append",
        default=[],
        metavar="ORIGIN",
        help="a web page's origin that may call this server, such as https://chat.example.com; repeatable",
    )
    parser.set_defaults(run=_serve)


def _serve(options: argparse.Namespace) -> None:
    serve(
        ServeOptions(
            artifact=options.artifact,
            run_dir=options.run_dir or Path(".run", str(options.port)),
            host=options.host,
            front=FrontOptions(
                options.grpc_front_host,
                options.grpc_front_cert,
                options.grpc_front_key,
            ),
            ports=Ports(
                options.port,
                options.triton_http_port,
                options.triton_grpc_port,
                options.triton_metrics_port,
                options.grpc_front_port,
            ),
            drain_timeout_s=options.drain_timeout_s,
            gateway_workers=options.gateway_workers,
            allowed_hosts=tuple(options.allow_host),
            allowed_origins=tuple(options.allow_origin),
            keys=options.keys,
            backend_directory=options.backend_directory,
            num_replicas=options.replicas,
        )
    )


def _add_chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", default=f"http://{LOOPBACK}:{Ports().gateway}", help="the gateway (default %(default)s)"
    )
    parser.add_argument("--model", default="auto", help="a tier, a model, or auto (default)")
    parser.add_argument("--key-env", metavar="NAME", help="the environment variable that holds the API key, if needed")
    parser.add_argument("--once", metavar="QUESTION", help="ask this one question instead of talking")
    parser.add_argument("--json", action="store_true", help="with --once: end with the facts as one JSON line")
    parser.set_defaults(run=_chat)


def _chat(options: argparse.Namespace) -> None:
    key = _read_key(options.key_env)
    if options.once is None:
        chat_loop(options.url, options.model, key)
    else:
        chat_once(options.url, options.once, options.model, as_json=options.json, key=key)


def _add_talk(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("question", type=Path, metavar="FILE", help="a recording: WAV, FLAC, Ogg or MP3")
    parser.add_argument(
        "--output", type=Path, default=Path("answer.wav"), metavar="FILE", help="the answer (default %(default)s)"
    )
    parser.add_argument(
        "--url", default=f"http://{LOOPBACK}:{Ports().gateway}", help="the gateway (default %(default)s)"
    )
    parser.add_argument("--model", default="auto", help="a tier, a model, or auto (default)")
    parser.add_argument("--key-env", metavar="NAME", help="the environment variable that holds the API key, if needed")
    parser.set_defaults(run=_talk)


def _talk(options: argparse.Namespace) -> None:
    talk(options.url, options.question, options.output, options.model, _read_key(options.key_env))


def _read_key(variable: str | None) -> str | None:
    key = None if variable is None else os.environ.get(variable)
    if variable is not None and not key:
        raise ChatError(f"--key-env {variable}: this environment variable is not set; put the API key there")
    return key


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; allowed: 1 to 65535, or 0 for a free one")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; seconds from 0 to 3600")
    return seconds


def _workers(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 64:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; 1 to 64 workers")
    return int(text)


def _replicas(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 16:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; 1 to 16 replicas")
    return int(text)


def _host(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a name or address without a port, such as chat.example.com")
    return text


def _origin(text: str) -> str:
    if not re.fullmatch(r"https?://[a-z0-9._-]+(:\d+)?|https?://\[[0-9a-f:.]+\](:\d+)?", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an origin as browsers send it, such as https://chat.example.com or http://localhost:3000"
        )
    return text


if __name__ == "__main__":
    sys.exit(main())
