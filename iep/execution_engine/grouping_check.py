"""An engine -> whether grouped execution gives the same results and gradients as calls, tested with random weights.

A call of a family runs the code of one module for all functions (`iep/batching/families.py`). This is exact for modules
that treat each row independently and use their weights only by calling their convolutions. Modules of other packages
may do anything else. The engine is therefore tested before grouped execution is used.
"""

import copy

import numpy as np
import torch
from torch import Tensor, nn

from iep.execution_engine.choices import DEFAULT_EXECUTION
from iep.execution_engine.engine import ExecutionEngine
from iep.execution_engine.roles import result_kind
from iep.programs import scene_index

TOLERANCE = 0.02
"""The greatest norm of a difference, relative to the norm of the exact value: more than the error of TF32."""


def check_grouping(engine: ExecutionEngine, execution: str) -> str | None:
    """Return a description of the first difference between an execution and calls, or None.

    A copy of the engine with random weights runs every function on maps of its own, forward and backward, without
    dropout.
    """
    weight = next(engine.parameters())
    generator = torch.Generator(weight.device).manual_seed(0)
    try:
        engine = copy.deepcopy(engine).eval().requires_grad_()
    except RuntimeError as error:
        return _describe(error)
    with torch.no_grad():
        for each in engine.parameters():
            each.normal_(std=(len(each) / each.numel()) ** 0.5 if each.dim() else 1, generator=generator)
    programs = _programs(engine)
    programs_BL, ops = np.array([*programs.values()]), [*programs]
    shape = (len(ops), engine.module_dim, *engine.grid)
    stems_BCHW = torch.randn(shape, device=weight.device, dtype=weight.dtype, generator=generator)

    def run(execution: str) -> dict[str, Tensor]:
        engine.zero_grad()
        results_BCHW, _ = engine.run_modules(engine.plan(programs_BL, execution=execution), stems_BCHW)
        results_BCHW.square().sum().backward()
        found = {f"the result of {engine.ops[op]}": each for op, each in zip(ops, results_BCHW.detach(), strict=True)}
        for name, part in engine.named_children():
            grads = [torch.zeros_like(each) if each.grad is None else each.grad for each in part.parameters()]
            found[f"the gradient of {name}"] = nn.utils.parameters_to_vector(grads) if grads else torch.zeros(0)
        return found

    expected = run(DEFAULT_EXECUTION)
    try:
        found = run(execution)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a module of another package raises
        return _describe(error)
    for name, exact in expected.items():
        if not (found[name] - exact).norm() <= TOLERANCE * exact.norm():
            return f"{name} differs if functions run together"
    return None


def _describe(error: Exception) -> str:
    return f"its modules cannot run together ({type(error).__name__}: {str(error).partition(chr(10))[0][:200]})"


def _programs(engine: ExecutionEngine) -> dict[int, list[int]]:
    """Return, by op, a program in which the function's value reaches the classifier, directly or through others."""
    scene = scene_index(engine.program_tokens)
    roles = {op: role for op, role in enumerate(engine.roles) if role is not None}
    readers: dict[int, list[int]] = {result_kind(engine.roles[scene]): []}
    for _ in roles:  # each round adds the functions whose results are of kinds that the last one has added
        for op, role in roles.items():
            for position, kind in enumerate(role.arguments if role.result in readers else ()):
                readers.setdefault(kind, [*readers[role.result], op, *[scene] * position])
    found = {op: [*readers[role.result], op] for op, role in roles.items() if role.result in readers}
    length = max(map(len, found.values()))  # arguments that are missing are the scene
    return {op: program + [scene] * (length - len(program)) for op, program in found.items()}
