"""One node: its services, their GPU, and what repairs them."""
