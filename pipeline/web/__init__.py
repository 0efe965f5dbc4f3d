"""Web pages of runs, with questions to their models, beside the Prefect UI or on their own."""
