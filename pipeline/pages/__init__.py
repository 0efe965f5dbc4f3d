"""Pages of runs: what they are, and questions to their models, beside the Prefect UI or by themselves."""
