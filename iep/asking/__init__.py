"""Questions about one image -> answers, and pictures of the programs that computed them."""
