"""Configuration: schema and loading."""
