"""A network trained on a vocabulary -> the same network for one with more question words, ready to learn these.

Johnson et al. 2017 (Inferring and Executing Programs, section 4.5) fine-tune on questions that people asked, in words
that CLEVR does not have. `iep-preprocess --expand-vocab` puts such words after the old ones; here the word embeddings
get rows for them. When that is wanted is up to `training/run.py`.

Shapes: V words of the network, N new ones, E embedding.
"""

import torch
from torch import nn

from iep.vocab import Vocab

STD = 0.01
"""Of the new words' embeddings, as the original toolkit draws them."""
PARTS_WITH_WORDS = ("encoder", "rnn")
"""What holds the words of a generator and of a baseline, as `--freeze` names it."""


def count_new_words(trained: Vocab, given: Vocab) -> int:
    """N, the number of question words that `given` has after all those of `trained`; 0 where it is not so made."""
    known = len(trained.question)
    return len(given.question) - known if given.question[:known] == trained.question else 0


def add_words(network: nn.Module, name: str, count: int, seed: int) -> None:
    """Give the network `name`, a generator or a baseline, N = `count` more question words.

    The embeddings (V, E) become (V + N, E): the old rows bit for bit as they were, the new ones normal with a standard
    deviation of 0.01, a function of `seed`. The network's `kwargs` say so too.
    """
    words = _embedding(network, name)
    generator = torch.Generator().manual_seed(seed)
    new_NE = torch.randn(count, words.embedding_dim, generator=generator) * STD
    words.weight = nn.Parameter(torch.cat([words.weight.detach(), new_NE.to(words.weight)]), words.weight.requires_grad)
    words.num_embeddings += count
    network.kwargs = network.kwargs | {"num_question_tokens": words.num_embeddings}


def _embedding(network: nn.Module, name: str) -> nn.Embedding:
    return network.get_submodule("encoder_embed" if name == "generator" else "rnn.embed")
