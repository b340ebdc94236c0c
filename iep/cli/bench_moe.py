"""`iep-bench moe`: a sparsely gated layer of experts, batched, grouped, by hand, and token by token."""

from typing import Any

import click
from tqdm import tqdm

from iep.cli.bench_trees import run_options, sizes
from iep.cli.options import RecordedCommand


@click.command(cls=RecordedCommand)
@sizes("--experts", "1,10,100,1000,10000", "Of the layer.")
@sizes("--tokens", "1,10,100,1000,10000", "A minibatch.")
@click.option("--k", type=click.IntRange(min=1), default=1, show_default=True, help="Experts of a token.")
@click.option(
    "--width",
    type=(click.IntRange(min=1), click.IntRange(min=1), click.IntRange(min=1)),
    metavar="INPUTS HIDDEN OUTPUTS",
    default=(256, 256, 256),
    show_default=True,
    help="Of an expert.",
)
@click.option("--device", default="cpu", show_default=True, help="auto, cpu, cuda, cuda:1, ...")
@run_options
@click.pass_context
def moe(ctx: click.Context, **options: Any) -> None:
    """Time a layer of experts batched, grouped, by a sort and a loop, and token by token, and its bound.

    Every number of experts with every size of minibatch, as memory allows: the map of speed-ups. What takes longer
    than --max-seconds at its first run is left out. On a GPU the first of --threads alone is measured. What the
    columns mean: benchmarks/README.md.
    """
    few = min(options["experts"])
    if options["k"] > few:
        raise click.BadParameter(
            f"{options['k']} different experts of {few}: lower it, or raise --experts", param_hint="--k"
        )
    # Imported late: `--help` should not wait for torch.
    from iep.bench.measure import Effort
    from iep.bench.moe_run import ExpertsBenchmark, run_experts_benchmark
    from iep.bench.workload_run import Files

    files = Files(*(options.pop(name) for name in ("json", "table", "picture")))
    effort = Effort(options.pop("repeat"), options.pop("max_seconds"))
    with tqdm(unit=" measurements", leave=False, mininterval=1.0) as bar:

        def progress(what: str) -> None:
            bar.set_description_str(what, refresh=False)
            bar.update()

        benchmark = ExpertsBenchmark(effort=effort, **options)
        run_experts_benchmark(benchmark, ctx.meta["command"], files, say=bar.write, progress=progress)
    if files.wanted:
        click.echo(f"\nWrote {', '.join(map(str, files.wanted))}")
