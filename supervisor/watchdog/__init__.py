"""Looks at every service in rounds and says what is wrong."""
