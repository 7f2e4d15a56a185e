"""The supervisors of benchmarks/supervisors.py, each behind the same few methods."""
