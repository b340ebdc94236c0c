"""Questions about one image -> answers, and pictures of how they came about."""
