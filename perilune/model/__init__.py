"""The K3 model: one forward for training, prefill and decode."""
