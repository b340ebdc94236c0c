"""Recursive networks over nested lists of words, one sample at a time, and the same code batched by one line.

Every sample is a sentence in brackets, such as [["the", "cat"], ["sat", "down"]], and so has a network of its own.
"""

import torch
from torch import nn
from torch.nn import functional

from iep.dynamic import scope

SENTENCES = [
    (["a", ["fine", "film"]], 1),
    ([["a", "dull"], "film"], 0),
    (["fine", "film"], 1),
    ([["not", "a"], ["fine", "film"]], 0),
]
WORDS = {word: torch.tensor(n) for n, word in enumerate(["a", "fine", "dull", "film", "not"])}


class Merge(nn.Module):
    """Two vectors -> one. Written for one pair of vectors, not for a batch."""

    def __init__(self, width: int):
        super().__init__()
        self.both = nn.Linear(2 * width, width)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.both(torch.cat([left, right])))


torch.manual_seed(0)
embed, merge, classify = nn.Embedding(len(WORDS), 16), Merge(16), nn.Linear(16, 2)


def vector(tree):
    """The vector of a word or of two subtrees."""
    return embed(WORDS[tree]) if isinstance(tree, str) else merge(*map(vector, tree))


optimizer = torch.optim.Adam([*embed.parameters(), *merge.parameters(), *classify.parameters()], lr=0.02)
for _step in range(30):
    with scope(embed, merge, classify) as batch:  # the one line; without it, every call runs by itself
        scores = [classify(vector(tree)) for tree, _ in SENTENCES]
    loss = functional.cross_entropy(torch.stack(scores), torch.tensor([label for _, label in SENTENCES]))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

print(batch.report())
print(f"loss {loss.item():.3f}")
