"""The training stages and their one trainer."""
