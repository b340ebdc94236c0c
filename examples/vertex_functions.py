"""A network whose shape depends on the example, by vertex functions: sums of terms written as trees.

Each example is an expression such as (3 + (5 - 2)), and each vertex a number or an operation on two results. What a
vertex does is declared once; each example is described by its edges only. All vertices that are ready run together,
whichever example they belong to.

    python examples/vertex_functions.py
"""

import numpy as np
import torch
from torch import nn

from iep.dynamic import Edges, VertexFunction, VertexNetwork

NUMBER, OPERATION = range(2)


class Calculator(nn.Module):
    """Learns the meaning of digits and signs from the values of expressions."""

    def __init__(self, width=32):
        super().__init__()
        self.digits, self.signs = nn.Embedding(10, width), nn.Embedding(2, width)
        self.combine = nn.Sequential(nn.Linear(3 * width, width), nn.Tanh(), nn.Linear(width, width))
        self.read = nn.Linear(width, 1)
        self.network = VertexNetwork(
            [
                VertexFunction(self.number, pulls=("digit",)),
                VertexFunction(self.operation, gathers=("h",), pulls=("sign",)),
            ],
            states={"h": (width,)},
        )

    def number(self, vertices):
        vertices.scatter(h=vertices.pull("digit"))

    def operation(self, vertices):
        terms = vertices.gather("h").flatten(1)  # (G, 2, width): both arguments, in their order
        vertices.scatter(h=self.combine(torch.cat([terms, vertices.pull("sign")], dim=1)))

    def forward(self, plan):
        inputs = {"digit": self.digits(plan.rows["digit"]), "sign": self.signs(plan.rows["sign"])}
        return self.read(self.network(plan, inputs).roots["h"]).squeeze(1)


def expression(rng, operations):
    """Return the edges and the value of a random expression; arguments come before the operations that read them."""
    children, function, symbol, values = [], [], [], []
    unused = []
    for _ in range(operations + 1):
        children.append((-1, -1)), function.append(NUMBER), symbol.append(int(rng.integers(10)))
        unused.append(len(values))
        values.append(symbol[-1] / 10)
    for _ in range(operations):
        left, right = (unused.pop(rng.integers(len(unused))) for _ in range(2))
        children.append((left, right)), function.append(OPERATION), symbol.append(int(rng.integers(2)))
        unused.append(len(values))
        values.append(values[left] + values[right] if symbol[-1] == 0 else values[left] - values[right])
    rows = np.array(symbol)
    return Edges(np.array(children), np.array(function), {"digit": rows, "sign": rows}), values[-1]


def main():
    torch.manual_seed(0)
    rng, model = np.random.default_rng(0), Calculator()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(201):
        edges, values = zip(*[expression(rng, operations=int(rng.integers(1, 6))) for _ in range(64)], strict=True)
        plan = model.network.plan(edges)
        loss = (model(plan) - torch.tensor(values)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            nodes, calls = sum(len(group.nodes) for group in plan.schedule), len(plan.schedule)
            print(f"step {step}: squared error {loss:.3f}; {nodes} vertices of 64 trees in {calls} calls")


if __name__ == "__main__":
    main()
