"""Thin Prefect flows around the stages; the only room that imports Prefect."""
