"""Tables and figures of the papers, one YAML file each, and the runner that makes them. Run from a checkout."""
