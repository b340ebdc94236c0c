"""Checkpoints in the original toolkit's layout, with random weights, and a second implementation of its networks.

The networks share nothing with the product's: they are built from the original's options, their weights have the
original's names, and they compute one example at a time in float64.

Shapes: B examples, C H W feature maps, T question tokens, L program tokens, A answers.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tiny_data import CHANNELS, VOCAB
from torch import Tensor, nn
from torch.func import functional_call

WIDE = 7
GENERATOR = {"wordvec_dim": 5, "hidden_dim": 6, "rnn_num_layers": 2, "rnn_dropout": 0}
ENGINE = {
    "feature_dim": (CHANNELS, WIDE, WIDE),
    "stem_num_layers": 2,
    "stem_batchnorm": False,
    "module_dim": 4,
    "module_residual": True,
    "module_batchnorm": False,
    "classifier_proj_dim": 5,
    "classifier_downsample": "maxpool2",
    "classifier_fc_layers": (6,),
    "classifier_batchnorm": False,
    "classifier_dropout": 0,
}
LSTM = {
    "rnn_wordvec_dim": 5,
    "rnn_dim": 6,
    "rnn_num_layers": 2,
    "rnn_dropout": 0,
    "fc_dims": (7,),
    "fc_use_batchnorm": False,
    "fc_dropout": 0,
}
CNN = {
    "cnn_feat_dim": (CHANNELS, WIDE, WIDE),
    "cnn_res_block_dim": 4,
    "cnn_num_res_blocks": 0,
    "cnn_proj_dim": 5,
    "cnn_pooling": "maxpool2",
}
ATTENTION = {"cnn_feat_dim": (CHANNELS, WIDE, WIDE), "stacked_attn_dim": 5, "num_stacked_attn": 2}
BASELINES = {"LSTM": LSTM, "CNN+LSTM": LSTM | CNN, "CNN+LSTM+SA": LSTM | ATTENTION}


class Block(nn.Module):
    """Two convolutions; a residual block has a shortcut around them."""

    def __init__(self, dim: int, residual: bool = True, norm: bool = True):
        super().__init__()
        self.residual = residual
        self.conv1, self.conv2 = (nn.Conv2d(dim, dim, 3, padding=1) for _ in range(2))
        self.bn1, self.bn2 = (nn.BatchNorm2d(dim) if norm else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (x + inner if self.residual else inner).relu()


class BinaryBlock(nn.Module):
    """A projection of two inputs, and a block."""

    def __init__(self, dim: int, residual: bool, norm: bool):
        super().__init__()
        self.proj, self.res_block = nn.Conv2d(2 * dim, dim, 1), Block(dim, residual, norm)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.res_block(self.proj(torch.cat([first, second], dim=1)).relu())


def is_binary(token: str) -> bool:
    return token in ("union", "intersect", "less_than", "greater_than") or token.startswith("equal_")


class Engine(nn.Module):
    """A stem, a block for each token of programs, and a classifier."""

    def __init__(self, options: dict[str, Any]):
        super().__init__()
        channels, height, width = options["feature_dim"]
        dim, block = options["module_dim"], (options["module_residual"], options["module_batchnorm"])
        stem: list[nn.Module] = []
        for _ in range(options["stem_num_layers"]):
            stem += [nn.Conv2d(channels, dim, 3, padding=1), *[nn.BatchNorm2d(dim)] * bool(options["stem_batchnorm"])]
            stem.append(nn.ReLU())
            channels = dim
        self.stem = nn.Sequential(*stem)
        for token in VOCAB.program:
            self.add_module(token, (BinaryBlock if is_binary(token) else Block)(dim, *block))
        layers, norm = [], options["classifier_batchnorm"]
        if projection := options["classifier_proj_dim"]:
            layers += [nn.Conv2d(dim, projection, 1), *[nn.BatchNorm2d(projection)] * bool(norm), nn.ReLU()]
        side = {"none": 1, "maxpool2": 2, "maxpool4": 4}[options["classifier_downsample"]]
        layers += [*[nn.MaxPool2d(side)] * (side > 1), nn.Flatten()]
        size = (projection or dim) * (height // side) * (width // side)
        for hidden in options["classifier_fc_layers"]:
            layers += [nn.Linear(size, hidden), *[nn.BatchNorm1d(hidden)] * bool(norm), nn.ReLU()]
            layers += [nn.Dropout()] * bool(options["classifier_dropout"])
            size = hidden
        self.classifier = nn.Sequential(*layers, nn.Linear(size, len(VOCAB.answer)))

    def forward(self, image_CHW: Tensor, program_L: Sequence[int]) -> Tensor:
        """Return (1, A) logits, by recursion over the program; what a program lacks is the scene."""
        stem = self.stem(image_CHW[None])
        tokens = iter([VOCAB.program[index] for index in program_L if VOCAB.program[index] != "<START>"])

        def value() -> Tensor:
            token = next(tokens, "scene")
            if token in ("scene", "<NULL>"):
                return self.scene(stem)
            return getattr(self, token)(*[value() for _ in range(1 + is_binary(token))])

        return self.classifier(value())


class Generator(nn.Module):
    """An LSTM that reads a question, and one that writes its program."""

    def __init__(self, options: dict[str, Any]):
        super().__init__()
        words, hidden, layers = options["wordvec_dim"], options["hidden_dim"], options["rnn_num_layers"]
        self.encoder_embed = nn.Embedding(len(VOCAB.question), words)
        self.encoder_rnn = nn.LSTM(words, hidden, layers)
        self.decoder_embed = nn.Embedding(len(VOCAB.program), words)
        self.decoder_rnn = nn.LSTM(hidden + words, hidden, layers)
        self.decoder_linear = nn.Linear(hidden, len(VOCAB.program))

    def forward(self, question_T: Tensor) -> list[int]:
        """Return <START> and the likeliest tokens one by one, until <END> or 30 of them. Any token may come, <NULL>
        too, and is what the decoder reads next."""
        encoding = self.encoder_rnn(self.encoder_embed(question_T))[0][-1]
        state, program = None, [1]
        while len(program) <= 30 and program[-1] != 2:
            read = torch.cat([encoding, self.decoder_embed.weight[program[-1]]])
            top, state = self.decoder_rnn(read[None], state)
            program.append(int(self.decoder_linear(top[0]).argmax()))
        return program


class Baseline(nn.Module):
    """An LSTM that reads a question; with it a CNN or attention to the features of the image; and a classifier."""

    def __init__(self, options: dict[str, Any]):
        super().__init__()
        words, hidden = options["rnn_wordvec_dim"], options["rnn_dim"]
        lstm = nn.LSTM(words, hidden, options["rnn_num_layers"])
        self.rnn = nn.ModuleDict({"embed": nn.Embedding(len(VOCAB.question), words), "rnn": lstm})
        size, (channels, height, width) = hidden, options.get("cnn_feat_dim", (0, 0, 0))
        if "cnn_pooling" in options:
            cnn: list[nn.Module] = []
            if blocks := options["cnn_num_res_blocks"]:
                dim = options["cnn_res_block_dim"]
                cnn += [nn.Conv2d(channels, dim, 3, padding=1), nn.ReLU(), *(Block(dim) for _ in range(blocks))]
                channels = dim
            if projection := options["cnn_proj_dim"]:
                cnn += [nn.Conv2d(channels, projection, 1), nn.ReLU()]
                channels = projection
            side = {"none": 1, "maxpool2": 2}[options["cnn_pooling"]]
            self.cnn = nn.Sequential(*cnn, nn.MaxPool2d(side), nn.Flatten())
            size += channels * (height // side) * (width // side)
        self.steps = options.get("num_stacked_attn", 0)
        if "num_stacked_attn" in options:
            wide = options["stacked_attn_dim"]
            self.image_proj = nn.Conv2d(channels, hidden, 1)
            for step in range(self.steps):
                parts = {"Wv": nn.Conv2d(hidden, wide, 1), "Wu": nn.Linear(hidden, wide), "Wp": nn.Conv2d(wide, 1, 1)}
                self.add_module(f"stacked-attn-{step}", nn.ModuleDict(parts))
        norm, dropout = bool(options["fc_use_batchnorm"]), [nn.Dropout()] * bool(options["fc_dropout"])
        layers = [*dropout, *[nn.BatchNorm1d(size)] * norm]
        for dim in options["fc_dims"]:
            layers += [nn.Linear(size, dim), *[nn.BatchNorm1d(dim)] * norm, *dropout, nn.ReLU()]
            size = dim
        self.classifier = nn.Sequential(*layers, nn.Linear(size, len(VOCAB.answer)))

    def forward(self, image_CHW: Tensor, question_T: Tensor) -> Tensor:
        """Return (1, A) logits."""
        query = self.rnn["rnn"](self.rnn["embed"](question_T))[0][-1:]
        if hasattr(self, "cnn"):
            query = torch.cat([query, self.cnn(image_CHW[None])], dim=1)
        for step in range(self.steps):
            attention, seen = getattr(self, f"stacked-attn-{step}"), self.image_proj(image_CHW[None])
            hidden = torch.tanh(attention["Wv"](seen) + attention["Wu"](query)[..., None, None])
            shares = attention["Wp"](hidden).flatten().softmax(0).view(1, 1, *seen.shape[2:])
            query = query + (shares * seen).sum((2, 3))
        return self.classifier(query)


def compute(network: nn.Module, weights: dict[str, Tensor], *arguments: Any) -> Any:
    """Return what a network with these weights computes in evaluation mode, in float64."""
    exact = {name: value.double() for name, value in weights.items() if value.is_floating_point()}
    return functional_call(network.eval(), exact, arguments)


# Files


def random_weights(network: nn.Module, seed: int, counted: bool = True) -> dict[str, Tensor]:
    """Return seeded weights, such that values neither grow nor vanish from layer to layer, and statistics of norms.

    Older versions of PyTorch did not count the minibatches that a norm has seen.
    """
    draw, weights = torch.Generator().manual_seed(seed), {}
    for name, value in network.state_dict().items():
        noise = torch.randn(value.shape, generator=draw)
        if name.endswith("num_batches_tracked"):
            noise = torch.tensor(12)
        elif name.endswith("running_var") or (value.dim() == 1 and name.endswith("weight")):
            noise = torch.rand(value.shape, generator=draw) + 0.5
        elif value.dim() == 1:  # biases and means
            noise *= 0.2
        elif "embed" not in name:
            noise *= (3 if "rnn" in name else 1) * (1.5 / value[0].numel()) ** 0.5
        if counted or name.rpartition(".")[2] != "num_batches_tracked":
            weights[name] = noise
    return weights


def engine_file(seed: int = 0, counted: bool = True, **options: Any) -> dict[str, Any]:
    """Return `execution_engine_kwargs` and `_state`."""
    options = ENGINE | options
    weights = random_weights(Engine(options), seed, counted)
    return {"execution_engine_kwargs": {"vocab": vocab(), **options}, "execution_engine_state": weights}


def engine_logits(file: dict[str, Any], features_BCHW: Tensor, programs_BL: Sequence[Sequence[int]]) -> Tensor:
    """Return (B, A) float64 logits."""
    network, weights = Engine(file["execution_engine_kwargs"]), file["execution_engine_state"]
    examples = zip(features_BCHW.double(), programs_BL, strict=True)
    return torch.cat([compute(network, weights, *example) for example in examples])


def generator_file(seed: int = 0, **options: Any) -> dict[str, Any]:
    """Return `program_generator_kwargs` and `_state`."""
    options = GENERATOR | options
    weights = random_weights(Generator(options), seed)
    weights["decoder_linear.weight"] *= 4  # so that what comes next depends on what came before
    sizes = {"encoder_vocab_size": len(VOCAB.question), "decoder_vocab_size": len(VOCAB.program)}
    return {"program_generator_kwargs": sizes | options, "program_generator_state": weights}


def decode(file: dict[str, Any], question_T: Sequence[int]) -> list[int]:
    """Return the program of a question, which ends before the first <NULL>."""
    question_T = torch.tensor([token for token in question_T if token])
    return compute(Generator(file["program_generator_kwargs"]), file["program_generator_state"], question_T)


def baseline_file(kind: str, seed: int = 0, counted: bool = True, **options: Any) -> dict[str, Any]:
    """Return `baseline_type`, `_kwargs` and `_state`."""
    options = BASELINES[kind] | options
    weights = random_weights(Baseline(options), seed, counted)
    return {"baseline_type": kind, "baseline_kwargs": {"vocab": vocab(), **options}, "baseline_state": weights}


def baseline_logits(file: dict[str, Any], features_BCHW: Tensor, questions_BT: Sequence[Sequence[int]]) -> Tensor:
    """Return (B, A) float64 logits."""
    network, found = Baseline(file["baseline_kwargs"]), []
    for image_CHW, question_T in zip(features_BCHW.double(), questions_BT, strict=True):
        question_T = torch.tensor([token for token in question_T if token])
        found.append(compute(network, file["baseline_state"], image_CHW, question_T))
    return torch.cat(found)


def vocab() -> dict[str, dict]:
    """Return the vocabulary as the original keeps it: both ways, indices as whole numbers."""
    held = VOCAB.to_json()
    inverse = {
        name.replace("token_to_idx", "idx_to_token"): {i: t for t, i in table.items()} for name, table in held.items()
    }
    return held | inverse


def write(path: Path, content: dict[str, Any], **how: Any) -> Path:
    """Write a torch file of all the keys that the original writes, `content` over those of a file without networks."""
    parts = ("program_generator", "execution_engine", "baseline")
    empty = {f"{part}_{what}": None for part in parts for what in ("kwargs", "state")}
    statistics = {"train_losses": [2.5, 1.25], "train_losses_ts": [1, 2], "val_accs": [0.5], "model_t": 2}
    arguments = {"args": {"model_type": "PG+EE", "batch_size": 64, "checkpoint_path": "data/checkpoint.pt"}}
    torch.save({**arguments, **empty, "baseline_type": None, "vocab": vocab(), **statistics, **content}, path, **how)
    return path
