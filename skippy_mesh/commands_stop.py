"""``skippy-mesh stop``: end a mesh of a Ray cluster, as a signal to its driver would."""

from __future__ import annotations

import argparse

from skippy_mesh.errors import UsageError
from skippy_mesh.planning import cluster_address


def add_stop_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--mesh-name", default="skippy", metavar="NAME", help="(%(default)s)")
    add("--address", metavar="RAY", help="its Ray cluster (RAY_ADDRESS, else the one running here)")
    add(
        "--drain-s", type=float, metavar="S",
        help="let run for so long what runs (as serve was told)",
    )  # fmt: skip
    add("--debug", action="store_true", help="show tracebacks")


def run_stop(args: argparse.Namespace) -> int:
    """Returns when nothing of the mesh is left."""
    if args.drain_s is not None and not args.drain_s >= 0:
        raise UsageError(f"--drain-s must be 0 or more, got {args.drain_s:g}")
    from coordinator.detached import stop_mesh
    from coordinator.launch import ray_cluster

    address = cluster_address(args) or "auto"
    with ray_cluster(address=address, num_cpus=0, namespace=args.mesh_name):
        stop_mesh(args.mesh_name, drain_s=args.drain_s)
    print(f"mesh {args.mesh_name} has ended")
    return 0
