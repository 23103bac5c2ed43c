"""`jackfield plan`: the resharding of a configuration as text and picture, without a GPU and without starting anything."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command("plan")
@click.argument("config")
@click.argument("overrides", nargs=-1)
@click.option("--gpus", type=int, help="GPUs of the policy; default: its `gpus`, or the fewest that hold one replica of both sides.")
@click.option("--engine-gpus", type=int, help="Put the engine on so many GPUs of its own.")
@click.option("--gpus-per-node", type=int, default=8, show_default=True, help="GPUs joined by NVLink.")
@click.option("--nvlink", type=float, default=400, show_default=True, help="GB/s that a GPU sends inside its node.")
@click.option("--network", type=float, default=50, show_default=True, help="GB/s that a GPU sends to other nodes.")
@click.option(
    "--place", type=click.Choice(["identity", "overlap"]), default="identity", help="Where engine ranks go: in order, or for overlap."
)
@click.option("--ranks", type=int, default=16, show_default=True, help="Rows of the table.")
@click.option("--draw", type=click.Path(path_type=Path, dir_okay=False), help="Write a picture, .png or .svg.")
@click.option("--moves", type=int, help="List every transfer to this engine rank.")
@click.option("--json", "as_json", is_flag=True, help="Totals as JSON.")
def command(
    config: str,
    overrides: tuple[str, ...],
    gpus: int | None,
    engine_gpus: int | None,
    gpus_per_node: int,
    nvlink: float,
    network: float,
    place: str,
    ranks: int,
    draw: Path | None,
    moves: int | None,
    as_json: bool,
) -> None:
    """Show how CONFIG's weights travel from training to the engine: who sends what to whom, what is shared, and the proof."""
    import math

    from jackfield.config import load_config, role_config
    from jackfield_reshard.classes import ITEM, between
    from jackfield_reshard.describe import engine_layout, lines, size, smallest, training_layout
    from jackfield_reshard.families import read_config, tensors
    from jackfield_reshard.plan import plan
    from jackfield_reshard.topology import Topology

    settings = load_config(config, overrides)
    policy = role_config(settings, "policy")
    assert policy.model is not None
    assert policy.backend is not None
    world = gpus or policy.gpus or smallest(policy.backend, settings.engine)
    engines = engine_gpus or world
    source, destination = training_layout(policy.backend, world), engine_layout(settings.engine, engines)
    dtype = str(policy.backend.options.get("dtype", "float32"))
    wanted = str(settings.engine.options.get("dtype", "auto"))
    target = ("bfloat16" if settings.engine.name == "vllm" else dtype) if wanted == "auto" else wanted
    table = tensors(read_config(policy.model.path), policy.model.head)
    rates = {"gpus_per_node": gpus_per_node, "nvlink": nvlink * 1e9, "network": network * 1e9}
    topology = Topology.separate(world, engines, **rates) if engine_gpus else Topology.colocated(world, engines, **rates)
    made = plan(between(table, source, destination, dtype, target, fused_qkv=False), topology, place)
    model_bytes = sum(math.prod(t.shape) * len(t.layers) * ITEM[t.dtype or target] for t in table)
    if as_json:
        proof = made.prove()
        totals = {
            "training": str(source),
            "engine": str(destination),
            "model_bytes": model_bytes,
            "local_bytes": made.bytes_local,
            "aliased_bytes": int(made.aliased.sum()),
            "sent_bytes": made.bytes_sent,
            "bound_bytes": int(proof.bound.sum()),
            "imbalance": proof.imbalance,
            "least_imbalance": proof.least_imbalance,
            "errors": list(proof.errors),
        }
        click.echo(json.dumps(totals))
    else:
        for line in lines(made, source, destination, model_bytes, ranks):
            click.echo(line)
    if moves is not None:
        for move in made.moves(destination=moves):
            way = ("in place", "node", "network")[move.tier]
            box = f"{move.name} {list(move.box[0])} {list(move.box[1])}"
            click.echo(f"{move.source:>5} -> {move.destination:<5} {way:9} {size(move.bytes):>10}  {box}")
    if draw is not None:
        from jackfield_reshard.picture import draw as paint

        paint(made, source, destination, draw)
        click.echo(f"picture: {draw}")
