"""Questions, with or without features -> answers without programs, to stand beside the product's own in a report."""
