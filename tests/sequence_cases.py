"""Random questions and programs for the networks that read sequences, and the gradients of all their parameters."""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from iep.vocab import END, NULL, START


def pad_rows(rows: list[list[int]]) -> Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=NULL)


def random_rows(count: int, num_tokens: int, longest: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest - 1, (count,), generator=generator).tolist()
    return [[START, *torch.randint(3, num_tokens, (n,), generator=generator).tolist(), END] for n in lengths]


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


QUESTIONS = random_rows(7, 9, 9, seed=1)
