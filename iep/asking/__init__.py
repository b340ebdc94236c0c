"""Answers to questions about one image, and pictures of how they came about."""

LOOKS = {
    "norm": "norm over channels of each module's output",
    "gradient": "norm over channels of the gradient of the answer's score by each module's output",
}
"""What a map can show, by the name that `--look` takes."""
DEFAULT_LOOK = "norm"
MOST_WORDS = 10
"""Unknown words, ignored tokens and the like that are told or drawn one by one."""
