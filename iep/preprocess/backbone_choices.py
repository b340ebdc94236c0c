"""The names and default settings of backbones that commands show in `--help`. Importing this file loads no PyTorch."""

RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
"""The ResNets of torchvision that features can be computed with."""
RESNET, RESNET_STAGE, RESNET_IMAGE_SIZE = "resnet101", 3, 224
"""The network, the stage and the image size of Johnson et al. 2017, section 4.1."""
