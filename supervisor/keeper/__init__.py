"""The keeper: starts, reaps and, at the deadline, ends services. Standard library only."""
