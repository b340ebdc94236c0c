"""Models that answer without looking at the image, to stand beside the product's own in a report."""
