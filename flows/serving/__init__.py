"""The Prefect server, its deployments, and access control."""
