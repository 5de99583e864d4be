"""Maintenance tools: the dependency lock file, its audit, and the state diagrams of the documentation."""
