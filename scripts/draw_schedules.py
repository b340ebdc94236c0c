"""Draw the figures of schedules in the documentation: docs/batching.svg and docs/schedule.svg.

python scripts/draw_schedules.py
"""

from pathlib import Path

from iep.bench.show_plans import draw_plans, walk
from iep.bench.workload import encode
from iep.execution_engine.program_plan import plan_programs
from iep.runtime.pictures import save
from iep.vocab import Vocab

DOCS = Path(__file__).parents[1] / "docs"
QUESTIONS = {
    "How many red things\nare there?": "count filter_color[red] scene",
    "Are there more red cubes\nthan spheres?": (
        "greater_than count filter_shape[cube] filter_color[red] scene count filter_shape[sphere] scene"
    ),
    "What color is the cube\nleft of the red sphere?": (
        "query_color unique filter_shape[cube] relate[left] unique filter_shape[sphere] filter_color[red] scene"
    ),
    "How many things are\nred spheres or cubes?": (
        "count union filter_shape[sphere] filter_color[red] scene filter_shape[cube] scene"
    ),
}


def main() -> None:
    """Draw one schedule for the README, and two schedules to compare for docs/architecture.md."""
    vocab = Vocab.clevr()
    programs_BL = encode([program.split() for program in QUESTIONS.values()], vocab)
    plans = {
        name: plan_programs(programs_BL, vocab.program, scene="stem", batching=name)
        for name in ("improved", "lookahead")
    }
    drawn = [
        (f"{name}: {len(plan.schedule)} calls for {plan.graph.num_nodes} nodes", plan, list(walk(plan)))
        for name, plan in plans.items()
    ]
    save(draw_plans(drawn[1:], list(QUESTIONS)), DOCS / "batching.svg")
    save(draw_plans(drawn, [f"example {example}" for example in range(len(QUESTIONS))]), DOCS / "schedule.svg")


if __name__ == "__main__":
    main()
