"""Backends of the lock store: etcd over HTTP, a local SQLite file, and memory."""
