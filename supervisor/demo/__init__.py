"""A whole cluster on one machine, with faults on request."""
