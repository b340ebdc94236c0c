"""Draw the figures of schedules in the documentation: docs/batching.svg and docs/schedule.svg.

python scripts/draw_schedules.py
"""

from pathlib import Path

from iep.bench.show_plans import draw_plan
from iep.bench.workload import encode
from iep.execution_engine.choices import make_module_set
from iep.execution_engine.program_plan import plan_programs
from iep.execution_engine.roles import roles_of
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
    """Draw the default schedule for the README, and another one to compare it with for docs/architecture.md."""
    vocab = Vocab.clevr()
    programs_BL = encode([program.split() for program in QUESTIONS.values()], vocab)
    roles = roles_of(vocab.program, make_module_set("iep", dim=1, residual=True, norm="none", scene="stem"))
    for name, file in (("lookahead", "batching.svg"), ("improved", "schedule.svg")):
        plan = plan_programs(programs_BL, vocab.program, roles, batching=name)
        title = f"{name}: {len(plan.schedule)} calls for {plan.graph.num_nodes} nodes"
        (DOCS / file).write_text(draw_plan(title, plan, list(QUESTIONS)), encoding="utf-8")


if __name__ == "__main__":
    main()
