"""Services: what they are, which state they are in, how they are started and restarted."""
