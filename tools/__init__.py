"""What maintains the project's dependencies: the lock file, its hashes, and the audit of what it pins."""
