"""``serve``: its flags, and from a running mesh to a gateway in front of it.

Heavy imports (Ray, llama.cpp, the web server) happen inside the functions that need them.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from skippy_mesh import __version__
from skippy_mesh.api_flags import (
    add_api_flags,
    aliases_of,
    check_web,
    keys_of,
    limits_of,
    names_of,
    rules_of,
)
from skippy_mesh.detaching import Order, detach_order
from skippy_mesh.errors import UsageError
from skippy_mesh.places import AdmissionLimits, QueueBounds
from skippy_mesh.planning import (
    add_cache_flag,
    cluster_address,
    layout_of,
    planned,
    source_of,
    stage_specs,
)
from skippy_mesh.starting import chosen_engine, open_mesh, ready_text, settings_of

if TYPE_CHECKING:
    from coordinator.launch import Mesh
    from coordinator.planner import Plan
    from skippy_mesh.gateway.rules import ApiRules
    from skippy_mesh.gateway.server import GatewaySpec, Running
    from skippy_mesh.verdicts import Choice
    from stages.gguf_file import ModelFile

_UNSHOWN = ("run", "command", "debug")
_OPEN = (
    "skippy-mesh: warning: {host} is not this machine alone and no key is needed: "
    "whoever reaches it may ask (--api-key, or --host 127.0.0.1)"
)

_IN_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by Ray for who runs in a submitted job
_JOB_STOP = "RAY_JOB_STOP_WAIT_TIME_S"
_JOB_STOP_S = 3.0


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (%(default)s)")
    parser.add_argument(
        "--engine", choices=("auto", "mesh", "baseline"), default="auto",
        help="auto: mesh, or where the model's class failed its gate baseline: one at a time",
    )  # fmt: skip
    parser.add_argument(
        "-np", "--parallel", "--max-num-seqs", type=int, metavar="N",
        help="lower the number of requests that may run at once (default: what memory permits)",
    )  # fmt: skip
    parser.add_argument(
        "--max-model-len", "--kv-unified-per-slot", type=int, metavar="N",
        help="tokens a request may have, prompt and answer (what model and pool permit)",
    )  # fmt: skip
    parser.add_argument(
        "--gateway-node", metavar="NODE",
        help="the node of the Ray cluster that answers HTTP, by name, address or id (this one)",
    )  # fmt: skip
    parser.add_argument(
        "--detach", action="store_true",
        help="serve on when this command has ended, until skippy-mesh stop (needs --address)",
    )  # fmt: skip
    _add_queue_flags(parser)
    parser.add_argument(
        "--scheduling-policy", choices=("fcfs", "priority"), default="fcfs",
        help="who is admitted first (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--preemption-policy", default="newest", metavar="NAME",
        help="whose memory is taken when it runs short: newest, cheapest-recompute (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--inter-token-ms", type=float, default=200.0, metavar="MS",
        help="prompts may slow the answers being written down to this (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--pin-prefill-rows", type=int, metavar="N",
        help="rows of prompt beside live answers, instead of what pacing finds",
    )  # fmt: skip
    parser.add_argument(
        "--pin-running", type=int, metavar="N",
        help="requests that run at once, instead of what pacing finds",
    )  # fmt: skip
    add_cache_flag(parser)
    add_api_flags(parser)
    parser.add_argument("--step-log", metavar="FILE", help="write a JSON line for every step")


def _add_queue_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-queue", "--max-num-queued-reqs", type=int, metavar="N",
        help="requests that may wait (4 for each that may run, at least 16)",
    )  # fmt: skip
    parser.add_argument(
        "--max-queue-tokens", "--max-num-queued-tokens", type=int, metavar="N",
        help="prompt tokens that may wait (4 times the smallest pool)",
    )  # fmt: skip
    parser.add_argument(
        "--queue-timeout-s", type=float, default=0.0, metavar="S",
        help="refuse who waits longer, and who would (0: off)",
    )  # fmt: skip


def serve_model(args: argparse.Namespace, model: ModelFile) -> None:
    """Load ``model`` as ``args`` say and answer requests until a signal; with ``--detach`` have an
    actor do so, and return when it does."""
    from skippy_mesh.gateway.opening import saying_loading
    from skippy_mesh.gateway.server import listen, serve

    choice = _checked(args, model)
    rules = rules_of(args, model)
    lanes = 1 if choice.engine == "baseline" else args.parallel
    with ExitStack() as stack:
        plan = stack.enter_context(planned(args, model, lanes=lanes))
        _check_model_len(args.max_model_len, plan)
        _check_name(args)
        sock = None
        if args.gateway_node is None:
            sock = stack.enter_context(closing(listen(args.host, args.port)))
        port = args.port if sock is None else sock.getsockname()[1]
        spec = _gateway_spec(args, model, plan, port=port, engine=choice.engine, rules=rules)
        if spec.is_open:
            print(_OPEN.format(host=args.host), file=sys.stderr)
        if (warning := short_stop(os.environ, args.drain_s)) is not None:
            print(f"skippy-mesh: warning: {warning}", file=sys.stderr)
        print(f"skippy_mesh is loading {model.paths[0].name}", flush=True)
        if args.detach:
            if sock is not None:
                sock.close()  # it has shown that the port is free: the actor opens it
            ready = detach_order(_order(args, model, plan, spec, choice))
            print(ready + _end_text(args), end="", flush=True)
            return
        with nullcontext() if sock is None else saying_loading(sock):
            mesh = stack.enter_context(open_mesh(args, model, plan, engine=choice.engine))
        limits = bounds_of(args).limits(ceiling=mesh.ceiling.value, num_cells=mesh.num_cells)
        spec = spec.with_limits(limits)
        gateway, url = stack.enter_context(_gateway(args, spec, mesh, limits, sock))
        serve(gateway, ready_text(mesh, choice, url))


def _check_model_len(asked: int | None, plan: Plan) -> None:
    """Said before anything is loaded: it may only be lowered."""
    if asked is not None and asked > plan.context:
        reason = "the pool" if plan.context == plan.num_cells else "what the model was trained for"
        raise UsageError(
            f"--max-model-len {asked} is more than {plan.context}, {reason}: lower it"
            + (", or raise --ctx-size" if plan.context == plan.num_cells else "")
        )


def _checked(args: argparse.Namespace, model: ModelFile) -> Choice:
    """The engine, and :class:`UsageError` for flags that cannot be meant, before anything slow."""
    if args.gateway_node is not None and not cluster_address(args):
        raise UsageError("--gateway-node needs a Ray cluster to choose from (--address)")
    if args.detach and not cluster_address(args):
        raise UsageError(
            "--detach needs a Ray cluster that is there when this command has ended (--address, or "
            "RAY_ADDRESS): one of its own ends with it"
        )
    settings_of(args)
    check_web(args)
    bounds_of(args).limits(ceiling=1, num_cells=1)
    choice = chosen_engine(args.engine, model)
    if args.detach and choice.engine == "baseline":
        raise UsageError(f"--detach needs --engine mesh; {choice.why}")
    return choice


def short_stop(environ: Mapping[str, str], drain_s: float) -> str | None:
    """What is to be said where a job's stop would kill who still runs."""
    stop_s = float(environ.get(_JOB_STOP) or _JOB_STOP_S)
    if _IN_JOB not in environ or drain_s < stop_s:
        return None
    needed = f'{{"env_vars": {{"{_JOB_STOP}": "{drain_s + 15:.0f}"}}}}'
    return (
        f"ray job stop kills after {stop_s:g} s, and --drain-s is {drain_s:g}: submit with "
        f"--runtime-env-json '{needed}', or lower it"
    )


def _check_name(args: argparse.Namespace) -> None:
    if cluster_address(args):
        from coordinator.detached import check_name

        check_name(args.mesh_name)


def _order(
    args: argparse.Namespace, model: ModelFile, plan: Plan, spec: GatewaySpec, choice: Choice
) -> Order:
    return Order(
        mesh_name=args.mesh_name,
        specs=stage_specs(args, model, plan),
        settings=settings_of(args),
        planned=plan.ceiling,
        spread=args.spread,
        choice=choice,
        gateway=spec,
        gateway_node=args.gateway_node,
        bounds=bounds_of(args),
        has_board=not args.no_ray_board,
    )


def _end_text(args: argparse.Namespace) -> str:
    flags = "" if args.address is None else f" --address {args.address}"
    if args.mesh_name != "skippy":
        flags += f" --mesh-name {args.mesh_name}"
    return f"It serves on by itself; to end it:\n  skippy-mesh stop{flags}\n"


@contextmanager
def _gateway(
    args: argparse.Namespace,
    spec: GatewaySpec,
    mesh: Mesh,
    limits: AdmissionLimits,
    sock: socket.socket | None,
) -> Iterator[tuple[Running, str]]:
    """A started gateway and its URL: here where the engine is here, else an actor on this node, or
    on the one that was asked for."""
    from coordinator.coordinator import Coordinator, DirectDoorkeeper
    from coordinator.launch import gateway_actor
    from skippy_mesh.gateway.server import GatewayServer

    if not mesh.is_remote:
        here = GatewayServer(spec)
        yield here, here.start(mesh, DirectDoorkeeper(Coordinator(limits)), sock)
        return
    if sock is not None:
        sock.close()  # it kept the port: the actor opens it again
    with gateway_actor(
        GatewayServer,
        spec,
        mesh,
        limits,
        mesh_name=args.mesh_name,
        node=args.gateway_node,
        has_board=not args.no_ray_board,
    ) as gateway:
        yield gateway, gateway.start()


def bounds_of(args: argparse.Namespace) -> QueueBounds:
    return QueueBounds(
        max_queue=args.max_queue,
        max_queue_tokens=args.max_queue_tokens,
        queue_timeout_s=args.queue_timeout_s,
    )


def _gateway_spec(
    args: argparse.Namespace,
    model: ModelFile,
    plan: Plan,
    *,
    port: int,
    engine: str,
    rules: ApiRules,
) -> GatewaySpec:
    """What can be known before anything is loaded; an unwritable log is found here."""
    from skippy_mesh.gateway.errors import digests_of
    from skippy_mesh.gateway.server import GatewaySpec
    from skippy_mesh.step_log import StepLog

    if args.step_log is not None:
        StepLog(args.step_log).close()
    return GatewaySpec(
        host=args.host,
        port=port,
        model_path=source_of(args, model),
        model_name=names_of(args, model)[0],
        key_digests=digests_of(*keys_of(args)),
        limits=limits_of(args),
        drain_s=args.drain_s,
        ssl_keyfile=_whole(args.ssl_keyfile),
        ssl_certfile=_whole(args.ssl_certfile),
        rules=rules,
        step_log=_whole(args.step_log),
        counts_steps=engine != "baseline",
        metrics_aliases=aliases_of(args),
        build={
            "version": __version__,
            "llama_cpp": importlib.metadata.version("llama-cpp-python"),
            "backend": "cpu",
            "layout": layout_of(plan),
        },
        config=_shown(args),
        log_level="debug" if args.debug else args.log_level,
    )


def _whole(path: str | None) -> str | None:
    """The gateway may run in a process that works in another folder."""
    return None if path is None else str(Path(path).resolve())


def _shown(args: argparse.Namespace) -> dict[str, object]:
    """The flags for ``/status``, fit for JSON: no key, and of a file its name only."""
    shown: dict[str, object] = {
        name: value if isinstance(value, (str, int, float, tuple, type(None))) else str(value)
        for name, value in vars(args).items()
        if name not in _UNSHOWN
    }
    shown["model"] = Path(urlsplit(args.model).path).name
    if args.memory_fraction is not None:
        shown["memory_fraction"] = float(args.memory_fraction)
    shown["api_key"] = "***" if args.api_key else ""
    for name in ("step_log", "api_key_file", "chat_template_file", "ssl_keyfile", "ssl_certfile"):
        if shown[name] is not None:
            shown[name] = Path(str(shown[name])).name
    return shown
