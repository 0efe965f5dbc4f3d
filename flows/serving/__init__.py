"""The Prefect server, deployments, and whom they let in."""
