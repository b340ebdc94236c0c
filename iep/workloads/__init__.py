"""Networks whose shape depends on the example, on the core of `iep.batching`: trees, sentences, experts."""
