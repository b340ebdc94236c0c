"""Models to stand beside the product's own in a report: the commonest answer, and networks without programs."""
