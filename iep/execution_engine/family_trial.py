"""An engine -> whether its functions compute the same together as one by one, tried with random weights.

A call of a family runs the code of one module for all functions (`iep/batching/families.py`). This is exact for modules
that treat rows by themselves and use their weights only by calling their convolutions. Modules of other packages may do
anything else, so that the engine is tried before they run together.
"""

import copy

import numpy as np
import torch
from torch import Tensor

from iep.execution_engine.choices import DEFAULT_EXECUTION
from iep.execution_engine.engine import ExecutionEngine
from iep.execution_engine.roles import result_kind
from iep.programs import scene_index

TOLERANCE = 0.02
"""The greatest norm of a difference, relative to the norm of the exact value: more than the error of TF32."""


def difference_of_families(engine: ExecutionEngine, execution: str) -> str | None:
    """Return what a trial of an execution shows to differ from calls of one function, or None.

    A copy of the engine with random weights runs every function on maps of its own, forward and backward, without
    dropout.
    """
    weight = next(engine.parameters())
    generator = torch.Generator(weight.device).manual_seed(0)
    engine = copy.deepcopy(engine).eval().requires_grad_()
    with torch.no_grad():
        for each in engine.parameters():
            each.normal_(std=(len(each) / each.numel()) ** 0.5 if each.dim() else 1, generator=generator)
    programs = _programs(engine)
    programs_BL, ops = np.array([*programs.values()]), [*programs]
    shape = (len(ops), engine.module_dim, *engine.grid)
    stems_BCHW = torch.randn(shape, device=weight.device, dtype=weight.dtype, generator=generator)

    def run(execution: str) -> dict[str, Tensor]:
        engine.zero_grad(set_to_none=True)
        results_BCHW, _ = engine.run_modules(engine.plan(programs_BL, execution=execution), stems_BCHW)
        results_BCHW.square().sum().backward()
        results = {engine.ops[op]: result for op, result in zip(ops, results_BCHW.detach(), strict=True)}
        return results | {name: each.grad for name, each in engine.named_parameters() if each.grad is not None}

    expected = run(DEFAULT_EXECUTION)
    try:
        found = run(execution)
    except Exception as error:  # whatever a module of another package raises
        return f"its modules cannot run together ({type(error).__name__}: {str(error).partition(chr(10))[0][:200]})"
    for name in expected.keys() | found.keys():
        if name not in found or name not in expected:
            return f"{name} has a gradient only if functions run {'together' if name in found else 'one by one'}"
    for name, exact in expected.items():
        if not (found[name] - exact).norm() <= TOLERANCE * exact.norm():
            what = f"the result of {name}" if name in engine.ops.values() else f"the gradient of {name}"
            return f"{what} differs if functions run together"
    return None


def _programs(engine: ExecutionEngine) -> dict[int, list[int]]:
    """Return by op a program with each function whose value the classifier can read, directly or through others."""
    scene = scene_index(engine.program_tokens)
    roles = {op: role for op, role in enumerate(engine.roles) if role is not None}
    readers: dict[int, list[int]] = {result_kind(engine.roles[scene]): []}
    for _ in roles:  # each round adds the functions whose results are of kinds that the last one has added
        for op, role in roles.items():
            if role.result in readers and role.arguments and role.arguments[0] not in readers:
                readers[role.arguments[0]] = [*readers[role.result], op]
    found = {op: [*readers[role.result], op] for op, role in roles.items() if role.result in readers}
    length = 2 * max(map(len, found.values())) + 1  # arguments that are missing are the scene
    return {op: program + [scene] * (length - len(program)) for op, program in found.items()}
