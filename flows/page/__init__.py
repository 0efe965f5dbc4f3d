"""The page of a flow run in the Prefect UI: live progress, artifacts and final state."""
