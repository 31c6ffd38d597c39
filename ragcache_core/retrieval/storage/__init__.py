"""A store's files: documents, manifest, snapshots, and how they change."""
