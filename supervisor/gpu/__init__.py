"""What a GPU driver tells and does."""
