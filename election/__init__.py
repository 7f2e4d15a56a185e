"""Who may act: the cross-node lock. Knows nothing of GPUs or processes."""
