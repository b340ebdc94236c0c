"""The execution engine: programs' modules over images' features, batched over a minibatch of programs."""

from iep.execution_engine.engine import ExecutionEngine, Plan, plan_programs

__all__ = ["ExecutionEngine", "Plan", "plan_programs"]
