"""A small convolutional network that learns to see from scenes whose objects are known; its features are a backbone."""
